"""One group of ranks against a clock: the engine's loop without devices.

The scheduler, the page pool, the planner of switches and the policy are the engine's own; only the step is not run but
priced. A price is of the load at the beginning of a *stretch*: up to `every` steps in which the same requests draw a
token each. The policy is asked once in `every` steps, and at once when the number of requests has leapt. Within a
stretch steps are alike, so they are taken at once (`jump`); the outcome equals that of taking them one by one, to the
last bit.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TextIO

import numpy as np

from splash_jax.cost import Load, Room
from splash_jax.errors import ConfigError, PoolCorrupt, SwitchRefused
from splash_jax.kv import PagePool
from splash_jax.ownership import Bucket, KVShape, Layout, StateBytes, plan_switch
from splash_jax.scheduler import (
    Costs,
    Decision,
    Idle,
    Memory,
    Observer,
    PolicyConfig,
    Request,
    SamplingParams,
    Schedule,
    Scheduler,
    Snapshot,
    Switch,
    chunk_sizes,
    decide,
    log_line,
)
from splash_jax.scheduler.policy import LEAP
from splash_jax.simulate.traffic import Traffic

MOST_SLOTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What is served, and on what: the same for all groups of a fleet."""

    layouts: tuple[Layout, ...]
    pages: Mapping[Layout, int]  # per rank
    kv: KVShape
    state: StateBytes
    buckets: Mapping[Layout, Sequence[Bucket]]
    slots: int
    costs: Costs
    every: int = 16  # steps between two prices, and between two decisions

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"every must be at least 1 step, got {self.every}.")
        if not 1 <= self.slots <= MOST_SLOTS:
            raise ConfigError(f"a group runs 1 to {MOST_SLOTS} requests at once, not {self.slots}.")

    @property
    def longest(self) -> int:
        """Tokens of a request that fits every layout alone, a page to spare."""
        return min((self.pages[one] - 1) * self.kv.page_size * one.position_shares for one in self.layouts)


Rule = Callable[[Snapshot], Decision]


class Stretch(NamedTuple):
    """Steps alike, as they ran."""

    start: float  # seconds
    seconds: float  # of all its steps, a switch included
    steps: int
    layout: int  # index into the deployment's
    running: int
    waiting: int
    tokens: int  # live
    rows: int  # of one step
    switch: float  # of `seconds`: added by a switch
    costs: tuple[float, ...]  # seconds of one step in each layout


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run took. Per-request arrays [N] in the order of the traffic, seconds; NaN where it never came to be."""

    first_token: np.ndarray
    end: np.ndarray
    arrived: np.ndarray
    stretches: list[Stretch] = field(default_factory=list)
    loads: list[tuple[int, Load]] = field(default_factory=list)  # (stretch, load), where kept
    switches: list[tuple[float, str, str, float]] = field(default_factory=list)  # time, from, to, seconds added
    refused: int = 0
    preemptions: int = 0
    decisions: int = 0
    tokens: int = 0  # prompt and output tokens of ended requests
    busy: float = 0.0  # seconds in steps and switches

    @property
    def seconds(self) -> float:
        """From time 0 to the last token."""
        last = self.stretches[-1] if self.stretches else None
        return 0.0 if last is None else last.start + last.seconds


class Group:
    """One group serving its traffic in one layout, or where the policy leads it."""

    def __init__(self, deployment: Deployment, layout: Layout, policy: PolicyConfig | None = None, *,
                 rule: Rule = decide, jump: bool = True, keep: bool = True,
                 log: TextIO | None = None) -> None:  # fmt: skip
        """`policy` None: it stays in `layout`. `rule` decides. `keep`: stretches and loads, for pictures and the
        optimum in hindsight. `log`: where every decision is written as a line of JSON.
        """
        self.deployment, self.policy, self._rule = deployment, policy, rule
        self._jump, self._keep, self._log = jump, keep, log
        self.pool = PagePool(layout, deployment.kv, deployment.pages[layout])
        self.scheduler = Scheduler(deployment.slots, deployment.buckets.__getitem__)
        self._room = Room(deployment.kv, deployment.pages)
        most = ((one.owner_groups, buckets[-1]) for one, buckets in deployment.buckets.items())
        rows = max(groups * bucket.tiles * bucket.tile for groups, bucket in most)
        chunks = chunk_sizes(rows, next(iter(deployment.buckets.values()))[-1].tile)
        self.observer = Observer(costs=deployment.costs, room=self._room, slots=deployment.slots, chunks=chunks)
        self.memory = Memory()
        self._index = {one: i for i, one in enumerate(deployment.layouts)}

    def run(self, traffic: Traffic) -> Outcome:
        """Serve all of it. Raises `ConfigError` for a request that no layout could ever hold."""
        self._check(traffic)
        n = len(traffic)
        self._traffic, self._outputs = traffic, traffic.output.tolist()
        self._out = Outcome(first_token=np.full(n, np.nan), end=np.full(n, np.nan), arrived=np.full(n, np.nan))
        self._children: dict[int, list[int]] = {}
        for i in np.flatnonzero(traffic.after >= 0).tolist():
            self._children.setdefault(int(traffic.after[i]), []).append(i)
        first = np.flatnonzero(traffic.after < 0)
        self._due = [(float(traffic.arrival[i]), int(i)) for i in first]
        heapq.heapify(self._due)
        self._step = self._decided = 0
        self._chunk: int | None = None
        self._start, self._taken, self._left = 0.0, 0, 0  # of the present stretch: its start, steps taken, steps left
        self._seconds, self._now, self._rows = 0.0, 0.0, 0
        self._there = 0  # requests at the last decision
        self._alike = False  # whether the next step is like the last: a token of everyone, and nobody can be admitted
        while self._due or self.scheduler.unfinished:
            self._arrive()
            if not self.scheduler.unfinished:
                self._now, self._left = self._due[0][0], 0
                continue
            added = self._decide()
            if self._jump and self._alike and not added and self._fits(1):
                self._keep_open(self.scheduler.running)
                self._draw(list(self.scheduler.running), self._steady())
            else:
                schedule = self.scheduler.schedule(self.pool, added > 0, self._chunk)
                self._out.preemptions += len(schedule.preempted)
                self._take(schedule, added)
        self.pool.check(live=())
        return self._out

    def _check(self, traffic: Traffic) -> None:
        total = traffic.prompt + traffic.output
        if len(traffic) and total.max() > self.deployment.longest:
            i = int(total.argmax())
            raise ConfigError(
                f"request {i} has {total[i]} tokens and one alone may have {self.deployment.longest} in every layout. "
                f"Shorten the traffic, leave layouts out, or give ranks more memory."
            )

    def _arrive(self) -> None:
        while self._due and self._due[0][0] <= self._now:
            time, i = heapq.heappop(self._due)
            prompt, output = int(self._traffic.prompt[i]), int(self._traffic.output[i])
            limit = min(int(self._traffic.limit[i]), self.deployment.longest - prompt)
            request = Request(
                name=str(i), prompt_ids=[0] * prompt, params=_PARAMS, seed=0, max_total=prompt + max(limit, output)
            )
            self._out.arrived[i] = time
            self._alike = self._alike and bool(self.scheduler.waiting)  # behind others it waits as they do
            self.scheduler.add(request)
            if self.policy is not None and self.policy.step_seconds is not None:
                self._there = 0  # so that the size of its chunks is decided before it begins

    def _decide(self) -> float:
        """Ask the policy where it is due, and make its switch. Returns the seconds that a switch adds to the step."""
        if self.policy is None:
            return 0.0
        there = len(self.scheduler.running) + len(self.scheduler.waiting)
        like = self._there <= LEAP * there and there <= LEAP * self._there
        if like and self._step - self._decided < self.deployment.every:
            return 0.0
        self._there = there
        steps = max(1, self._step - self._decided)
        self._decided = self._step
        snapshot = self.observer.snapshot(
            self.scheduler, self.pool, step=self._step, time=self._now, policy=self.policy, memory=self.memory,
            steps=steps,
        )  # fmt: skip
        decision = self._rule(snapshot)
        self._out.decisions += 1
        if self._log is not None:
            self._log.write(log_line(snapshot, decision) + "\n")
        self.memory, action = decision.memory, decision.action
        if not isinstance(action, Idle):
            self._chunk = action.chunk or self._chunk
        if not isinstance(action, Switch):
            return 0.0
        dst = next(one for one in self.deployment.layouts if str(one) == action.layout)
        quote = next(q for q in snapshot.quotes if q.layout == action.layout)
        try:
            plan = plan_switch(
                self.pool.manifest(), dst, pages_per_rank=self.deployment.pages[dst], state=self.deployment.state,
                homes=self.scheduler.new_homes(self.pool, dst),
            )  # fmt: skip
        except SwitchRefused:
            self._out.refused += 1
            return 0.0
        added = quote.cheapest
        self._out.switches.append((self._now, str(self.pool.layout), action.layout, added))
        self.pool = PagePool.adopt(plan.after)
        self._left, self._alike = 0, False
        return added

    def _take(self, schedule: Schedule, added: float) -> None:
        """The step that was scheduled."""
        chunks, running = schedule.chunks, self.scheduler.running
        if not chunks:
            raise ConfigError(
                f"nothing can run at step {self._step}: {len(self.scheduler.waiting)} requests wait and the pool has "
                f"{min(self.pool.free_pages())} free pages on its fullest rank. Give ranks more memory."
            )
        alike = len(chunks) == len(running) and all(c.rows == 1 and c.draws for c in chunks) and not schedule.preempted
        if alike and not added and len(chunks) == self._rows:
            requests = [chunk.request for chunk in chunks]
            self._keep_open(requests)
            self._draw(requests, 1, scheduled=True)
            return
        self._open_stretch([(c.request, c.start, c.rows) for c in chunks])
        self._count(1, added)
        self._left, self._alike = 0, False
        for chunk in chunks:
            chunk.request.computed += chunk.rows
        self._drawn([chunk.request for chunk in chunks if chunk.draws], 1)
        self._rows = len(running) if alike else 0

    def _draw(self, requests: Sequence[Request], steps: int, scheduled: bool = False) -> None:
        """So many steps alike, in which every request draws a token."""
        self._count(steps, 0.0)
        if not scheduled:
            self.scheduler.begun = self.scheduler.begun.plus(draws=steps * len(requests))
        self._left -= steps
        self._alike = True
        for request in requests:
            request.computed += steps
        if not scheduled and not self.pool.grow_all({request.name: request.computed for request in requests}):
            raise PoolCorrupt(f"pages lack for {steps} further tokens of {len(requests)} requests.")
        self._drawn(requests, steps)

    def _count(self, steps: int, added: float) -> None:
        self._taken += steps
        self._step += steps
        self._now = self._start + self._taken * self._seconds + added
        self._out.busy = self._busy_before + self._taken * self._seconds + added
        self._note(steps, added)

    def _drawn(self, requests: Sequence[Request], steps: int) -> None:
        ended, drawn, outputs = [], [0] * steps, self._outputs
        for request in requests:
            ids, i = request.output_ids, int(request.name)
            if not ids:
                self._out.first_token[i] = self._now
            ids += drawn
            if len(ids) >= outputs[i]:
                ended.append(request)
        for request in ended:
            self._end(request)
        self._rows = len(self.scheduler.running)

    def _keep_open(self, requests: Sequence[Request]) -> None:
        if self._left == 0:
            self._open_stretch([(request, request.computed, 1) for request in requests])

    def _open_stretch(self, rows: Sequence[tuple[Request, int, int]]) -> None:
        load = Load(
            np.array([start + count for _, start, count in rows], np.int64),
            np.array([count for *_, count in rows], np.int64),
            np.array([self.pool.home(request.name) for request, *_ in rows], np.int64),
        )
        costs = self.deployment.costs.step_seconds(load)
        self._costs = tuple(costs[one] for one in self.deployment.layouts)
        self._seconds = costs[self.pool.layout]
        self._start, self._taken, self._left = self._now, 0, self.deployment.every
        self._load, self._busy_before = load, self._out.busy

    def _steady(self) -> int:
        """Steps from here in which the same requests draw one token each and nothing else happens; at least 1."""
        steps = self._left
        if self.policy is not None:
            steps = min(steps, self.deployment.every - (self._step - self._decided))
        for request in self.scheduler.running:
            steps = min(steps, self._outputs[int(request.name)] - len(request.output_ids))
        if self._due and steps > 1:
            steps = min(steps, max(1, self._steps_until(self._due[0][0])))
        while steps > 1 and not self._fits(steps):
            steps = max(1, steps // 2)
        return max(1, steps)

    def _steps_until(self, time: float) -> int:
        """Steps after which the clock stands at `time` or later for the first time."""
        taken = max(self._taken, math.ceil((time - self._start) / self._seconds) - 1)
        while self._start + taken * self._seconds < time:
            taken += 1
        while taken > self._taken + 1 and self._start + (taken - 1) * self._seconds >= time:
            taken -= 1
        return taken - self._taken

    def _fits(self, steps: int) -> bool:
        """Whether every rank has the pages for so many more tokens of everyone who runs."""
        running, layout = self.scheduler.running, self.pool.layout
        free = min(self.pool.free_pages())
        if free >= len(running) * (steps // self.deployment.kv.page_size + 2):
            return True
        context = np.array([r.computed + steps for r in running], np.int64)
        home = np.array([self.pool.home(r.name) for r in running], np.int64)
        need = self._room.needed(Load(context, np.ones_like(context), home))[layout]
        return bool(need.max() <= self.pool.pages_per_rank)

    def _note(self, steps: int, added: float) -> None:
        if not self._keep:
            self._last = Stretch(self._start, self._now - self._start, 0, 0, 0, 0, 0, 0, 0.0, ())
            self._out.stretches[:] = [self._last]
            return
        stretch = Stretch(
            self._start, self._now - self._start, self._taken, self._index[self.pool.layout],
            len(self.scheduler.running), len(self.scheduler.waiting), int(self._load.context.sum()),
            int(self._load.new_rows.sum()), added, self._costs,
        )  # fmt: skip
        if self._taken == steps:
            self._out.loads.append((len(self._out.stretches), self._load))
            self._out.stretches.append(stretch)
        else:
            self._out.stretches[-1] = stretch

    def _end(self, request: Request) -> None:
        i = int(request.name)
        self._out.end[i] = self._now
        self._out.tokens += request.known
        self.observer.lifetimes = self.observer.lifetimes.finished(len(request.output_ids), by_length=False)
        self.scheduler.finish(self.pool, request)
        self._left = 0
        self._alike = self._alike and not self.scheduler.waiting
        for child in self._children.get(i, ()):
            heapq.heappush(self._due, (self._now + float(self._traffic.arrival[child]), child))


_PARAMS = SamplingParams(max_tokens=None)


def buckets_of(layouts: Sequence[Layout], slots: int, prompt_rows: int, tile: int) -> dict[Layout, tuple[Bucket, ...]]:
    """The two shapes of a step: a row of everyone, with and without prompt rows."""
    found = {}
    for layout in layouts:
        decode = -(-slots // layout.owner_groups)
        tiles = max(1, -(-prompt_rows // (tile * layout.owner_groups)))
        found[layout] = (
            Bucket(decode=decode, tiles=0, tile=tile),
            Bucket(decode=decode, tiles=tiles, tile=tile),
        )
    return found
