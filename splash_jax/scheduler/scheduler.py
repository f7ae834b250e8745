"""Which rows run in the next step: continuous batching, chunked prompts, admission, preemption. Pure Python.

Everything that has a token to draw runs in every step; what room a step has left goes to prompts, oldest first. When
pages run out, the youngest request gives its own back and is computed again later.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from splash_jax.kv import PagePool, TwinPool
from splash_jax.ownership import Bucket, Layout, free_axes, groups_of_ranks, switch_buckets
from splash_jax.scheduler.request import Request, Rows, Status

Pool = PagePool | TwinPool


class Chunk(NamedTuple):
    """`rows` rows of one request from position `start`; `draws` when the token after the last of them is drawn."""

    request: Request
    start: int
    rows: int
    draws: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What the next step does."""

    chunks: tuple[Chunk, ...]
    buckets: tuple[Bucket, ...]  # one for each layout that layers run in
    preempted: tuple[Request, ...] = ()

    @property
    def bucket(self) -> Bucket:
        return self.buckets[-1]


class Begun(NamedTuple):
    """Work that was scheduled since the scheduler was made."""

    prompts: int = 0  # requests admitted, again after each preemption
    rows: int = 0  # of theirs that were known then
    draws: int = 0  # tokens

    def plus(self, prompts: int = 0, rows: int = 0, draws: int = 0) -> "Begun":
        return Begun(self.prompts + prompts, self.rows + rows, self.draws + draws)


class Waiting(NamedTuple):
    """Why the first request of the queue waits, and with it all behind it."""

    request: Request
    what: str  # "slots", "prompt rows" or "pages": what it lacks
    short: int  # by how many
    rank: int | None = None  # of pages: where; of both layouts' ranks, the source's first, while a switch is spread
    gave_to: str | None = None  # of a preempted one: the request that lacked so many pages

    def __str__(self) -> str:
        if self.gave_to is not None:
            return f"request {self.request.name} gave its pages to {self.gave_to}"
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"request {self.request.name} lacks {self.short} {self.what}{where}"


class Scheduler:
    """The queue of requests and the choice of every step's rows.

    `buckets` are the shapes a step may have in a layout, smallest first; the last is large enough for any of them.
    First come, first served: nobody passes the first request of the queue, so small ones never starve a large one.
    """

    def __init__(self, slots: int, buckets: Callable[[Layout], Sequence[Bucket]]) -> None:
        self._buckets = buckets
        self._slots = list(range(slots - 1, -1, -1))
        self._num_slots = slots
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.begun = Begun()
        self.waiting_for: Waiting | None = None  # as of the last step; None where nobody waits
        self.handling: list[Request] = []  # requests whose rows are being chosen; read after a fault

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def under_pressure(self, pool: Pool) -> bool:
        """Whether the requests that draw next need more pages than are free, so that someone must give way."""
        drawing = (request for request in self.running if request.rows is Rows.DRAW)
        return not pool.has_all({request.name: request.computed + 1 for request in drawing})

    def schedule(self, pool: Pool, switching: bool = False, chunk: int | None = None) -> Schedule:
        """Choose the next step's rows and take their pages in `pool`.

        May preempt: every result must have been read when `under_pressure`. `switching`: a switch
        happens inside the step. `chunk`: most prompt rows of it, at least 1; None: what its bucket holds.
        """
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk is {chunk}: prompts would never run. Give 1 or more, or None.")
        step = _Step(pool, [_Side(layout, self._buckets(layout)) for layout in pool.layouts], chunk)
        preempted: list[Request] = []
        prompts: list[Request] = []
        drawing: list[Request] = []
        for request in self.running:
            rows = request.rows
            if rows is Rows.DRAW:
                drawing.append(request)
            elif rows is Rows.PROMPT:
                prompts.append(request)
        self.handling = drawing
        if step.take_all(drawing):
            drawing = []
        for request in drawing:
            self.handling = [request]
            if request.status is not Status.RUNNING or not step.has_row(request):
                continue
            while request.status is Status.RUNNING and (short := pool.shortfall(request.name, request.computed + 1)):
                preempted.append(self._preempt_youngest(pool, request))
                self.waiting_for = Waiting(preempted[-1], "pages", short, gave_to=request.name)
            if request.status is Status.RUNNING:
                step.take(request, 1, draws=True)
        for request in prompts:
            self.handling = [request]
            if request.status is Status.RUNNING:
                self._prefill(step, request)
        self.handling = []
        if not preempted:
            self.waiting_for = self._admit(step)
        self.handling = []
        self.begun = self.begun.plus(draws=sum(chunk.draws for chunk in step.chunks))
        return Schedule(chunks=tuple(step.chunks), buckets=step.buckets(switching), preempted=tuple(preempted))

    def withdraw(self, pools: Sequence[PagePool], schedule: Schedule | None) -> None:
        """Take back a step that will not be dispatched, `schedule` as far as it was chosen.

        `pools` hold histories as the devices do. Running requests that are not in them wait again; pages of all others
        are freed. Pages and slots that a request was given stay its own: the next step finds them there.
        """
        self.handling = []
        self.waiting = deque(request for request in self.waiting if request not in self.running)
        for request in reversed([r for r in self.running if not all(r.name in pool for pool in pools)]):
            self._leave(request)
            request.status = Status.WAITING
            self.waiting.appendleft(request)
            self.begun = self.begun.plus(prompts=-1, rows=-request.known)
        running = {request.name for request in self.running}
        for pool in pools:
            for name in set(pool.manifest().requests) - running:
                pool.release(name)
        for request in self.waiting:
            request.status, request.computed, request.slot = Status.WAITING, 0, -1
        taken = {request.slot for request in self.running}
        self._slots = [slot for slot in range(self._num_slots - 1, -1, -1) if slot not in taken]
        self.waiting_for = None
        if schedule is not None:
            self.begun = self.begun.plus(draws=-sum(chunk.draws for chunk in schedule.chunks))

    def finish(self, pool: Pool, request: Request) -> None:
        """Take a request out, wherever it is, and give its pages and slot back."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self._evict(pool, request)
        request.status = Status.FINISHED

    def _prefill(self, step: "_Step", request: Request) -> None:
        """Run as much of what is known of a request as the step has room for."""
        rows = min(step.prompt_rows(request), request.known - request.computed)
        if rows > 0:
            last = request.computed + rows == request.known
            step.take_prompt(request, rows, draws=last and not request.score)

    def _admit(self, step: "_Step") -> Waiting | None:
        """Take requests from the queue while there is room; why the first one left waits, if one is left."""
        pool, load = step.pool, self._load(step.pool) if self._slots else []
        while self.waiting:
            request = self.waiting[0]
            if not self._slots:
                return Waiting(request, "slots", 1)
            self.handling = [request]
            home = self._lightest(pool.layout, load, step.homes_with_room())
            pool.add(request.name, home)
            if (lack := self._lack(step, request)) is not None:
                pool.release(request.name)
                return lack
            pool.grow(request.name, request.known)  # taken whole, so that a prompt once begun never waits for pages
            request.status, request.slot = Status.RUNNING, self._slots.pop()
            self.running.append(request)
            self.waiting.popleft()
            load[home] = (load[home][0] + 1, load[home][1] + request.max_total)
            self.begun = self.begun.plus(prompts=1, rows=request.known)
            self._prefill(step, request)
        return None

    def _lack(self, step: "_Step", request: Request) -> Waiting | None:
        """What keeps a request in the pool from beginning: rows, or pages for all that is known of it with a page to
        spare for everyone else.
        """
        if step.prompt_rows(request) == 0:
            return Waiting(request, "prompt rows", 1)
        pool = step.pool
        free, spare = pool.free_pages(), pool.requests_held()
        growth = pool.growth(request.name, request.known)
        short, rank = max((need + spare[rank] - 1 - free[rank], -rank) for rank, need in growth)
        return Waiting(request, "pages", short, -rank) if short > 0 else None

    def new_homes(self, pool: PagePool, dst: Layout) -> dict[str, int] | None:
        """Homes in `dst` by expected growth, largest first, chosen anew along the axes where owners appear.

        None where there are none: the layout so far ties a history to its home.
        """
        free = free_axes(pool.layout, dst)
        if not free:
            return None
        kept = [name for name in dst.axis_names if name not in free]
        place = [dst.index(rank, kept) for rank in range(dst.size)]
        load = [(0, 0)] * dst.size
        homes: dict[str, int] = {}
        for request in sorted(self.running, key=lambda r: (-r.max_total, r.name)):
            old = pool.home(request.name)
            home = self._lightest(dst, load, [rank for rank in range(dst.size) if place[rank] == place[old]])
            homes[request.name] = home
            load[home] = (load[home][0] + 1, load[home][1] + request.max_total)
        return homes

    def _load(self, pool: Pool) -> list[tuple[int, int]]:
        """Of every rank the requests at home there, and their tokens once all have grown to their ends."""
        load = [(0, 0)] * pool.layout.size
        for request in self.running:
            home = pool.home(request.name)
            load[home] = (load[home][0] + 1, load[home][1] + request.max_total)
        return load

    def _lightest(self, layout: Layout, load: list[tuple[int, int]], ranks: Sequence[int]) -> int:
        """Of `ranks`, one of the lightest group of owners, and in it the lightest rank; both below an even share of the
        slots. Lightest: the least history once all have grown to their ends, then the fewest requests. `load` holds
        (requests, tokens) of every rank.
        """
        groups, group_of = [(0, 0)] * layout.owner_groups, groups_of_ranks(layout)
        for rank, (count, total) in enumerate(load):
            group = group_of[rank]
            groups[group] = (groups[group][0] + count, groups[group][1] + total)

        def weight(one: tuple[int, int], parts: int) -> tuple[bool, int, int]:
            return one[0] >= -(-self._num_slots // parts), one[1], one[0]

        def key(rank: int) -> tuple[object, ...]:
            group = groups[group_of[rank]]
            return (*weight(group, len(groups)), *weight(load[rank], len(load)), rank)

        return min(ranks, key=key)

    def _preempt_youngest(self, pool: Pool, needy: Request) -> Request:
        """Put the youngest request that shares a rank with `needy` back at the head of the queue."""
        ranks = set(pool.holders(needy.name))
        victim = next(r for r in reversed(self.running) if ranks & set(pool.holders(r.name)))
        victim.preemptions += 1
        victim.computed = 0
        self.waiting.appendleft(victim)  # before it leaves: whatever interrupts this, it is in one of both
        self._evict(pool, victim)
        victim.status = Status.WAITING
        return victim

    def _evict(self, pool: Pool, request: Request) -> None:
        pool.release(request.name)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._slots.append(request.slot)
        request.slot = -1


class _Side:
    """The rows of one step as one layout counts them: per owner group."""

    def __init__(self, layout: Layout, buckets: Sequence[Bucket]) -> None:
        self.layout, self.buckets, self._most = layout, buckets, buckets[-1]
        self._group_of = groups_of_ranks(layout)
        self._decode, self._tiles = [0] * layout.owner_groups, [0] * layout.owner_groups

    def has_row(self, home: int) -> bool:
        group = self._group_of[home]
        return self._decode[group] < self._most.decode or self._tiles[group] < self._most.tiles

    def prompt_rows(self, home: int) -> int:
        return (self._most.tiles - self._tiles[self._group_of[home]]) * self._most.tile

    def take_all(self, homes: Sequence[tuple[int, int]]) -> None:
        """So many single rows of each home, for which there is room."""
        for home, count in homes:
            self._decode[self._group_of[home]] += count

    def has_all(self, homes: Sequence[tuple[int, int]]) -> bool:
        """Whether there is room for so many single rows of each home among the single rows."""
        rows = list(self._decode)
        for home, count in homes:
            rows[self._group_of[home]] += count
        return max(rows) <= self._most.decode

    def take(self, home: int, rows: int) -> None:
        group = self._group_of[home]
        if rows == 1 and self._decode[group] < self._most.decode:
            self._decode[group] += 1
        else:
            self._tiles[group] += -(-rows // self._most.tile)

    def fits(self, bucket: Bucket) -> bool:
        return bucket.decode >= max(self._decode) and bucket.tiles >= max(self._tiles)


class _Step:
    """The rows of one step as they are chosen; every layout that layers run in must have room for them."""

    def __init__(self, pool: Pool, sides: Sequence[_Side], chunk: int | None) -> None:
        self.pool, self._sides, self._left = pool, sides, chunk
        self.chunks: list[Chunk] = []

    def _each(self, request: Request) -> list[tuple[_Side, int]]:
        return list(zip(self._sides, self.pool.homes(request.name), strict=True))

    def has_row(self, request: Request) -> bool:
        return all(side.has_row(home) for side, home in self._each(request))

    def prompt_rows(self, request: Request) -> int:
        """Prompt rows there is still room for."""
        rows = min(side.prompt_rows(home) for side, home in self._each(request))
        return rows if self._left is None else min(rows, self._left)

    def homes_with_room(self) -> Sequence[int]:
        """Homes whose group has room for prompt rows, so that none idles beside a queue; all where none has."""
        side = self._sides[-1]
        ranks = range(side.layout.size)
        return [rank for rank in ranks if side.prompt_rows(rank)] or ranks

    def take(self, request: Request, rows: int, *, draws: bool) -> None:
        for side, home in self._each(request):
            side.take(home, rows)
        self.pool.grow(request.name, request.computed + rows)
        self.chunks.append(Chunk(request, request.computed, rows, draws))

    def take_all(self, drawing: Sequence[Request]) -> bool:
        """A row of each; False, and nothing taken, where rows or pages lack for some."""
        wanted = {request.name: request.computed + 1 for request in drawing}
        counts = Counter(map(self.pool.homes, wanted)).items()
        homes = [[(places[i], count) for places, count in counts] for i in range(len(self._sides))]
        each = list(zip(self._sides, homes, strict=True))
        if not all(side.has_all(rows) for side, rows in each) or not self.pool.grow_all(wanted):
            return False
        for side, rows in each:
            side.take_all(rows)
        self.chunks += [Chunk(request, request.computed, rows=1, draws=True) for request in drawing]
        return True

    def take_prompt(self, request: Request, rows: int, *, draws: bool) -> None:
        self._left = None if self._left is None else self._left - rows
        self.take(request, rows, draws=draws)

    def buckets(self, switching: bool) -> tuple[Bucket, ...]:
        """The smallest bucket that holds the rows; in two layouts, buckets at the same place from the end."""
        few = switching or len(self._sides) > 1
        choices = list(zip(*(switch_buckets(s.buckets) if few else s.buckets for s in self._sides), strict=True))
        fits = (c for c in choices if all(side.fits(b) for side, b in zip(self._sides, c, strict=True)))
        return next(fits, choices[-1])
