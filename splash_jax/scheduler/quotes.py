"""A snapshot of a scheduler and its pool: what every layout would hold, admit and take for it.

Layouts are compared in seconds per useful token of a step with everything that the layout could admit: a layout with
more room for histories runs a larger batch, and is credited for it. Useful are the tokens drawn, and the prompt rows
that all layouts compute alike. Prompts of requests yet to be admitted are work in any layout: they add to no layout's
tokens, but to every step what they take there, as many for each token drawn as have begun of late (`Flow`).
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from splash_jax.cost import Load, Room
from splash_jax.errors import PolicyError
from splash_jax.kv import PagePool
from splash_jax.ownership import Layout, free_axes, groups_of_ranks
from splash_jax.scheduler.flow import Flow, PromptSteps
from splash_jax.scheduler.lifetimes import FOREVER, SAMPLED, Lifetimes
from splash_jax.scheduler.request import Request
from splash_jax.scheduler.residuals import Residuals
from splash_jax.scheduler.scheduler import Begun, Scheduler
from splash_jax.scheduler.snapshot import Choice, Memory, PolicyConfig, Quote, Snapshot

LOOK_AHEAD = 256  # waiting requests that are tried for room
CHUNKS = 5  # sizes of chunks to choose among


class SwitchCost(NamedTuple):
    """What a switch adds to the steps it happens in, in one way or both. Seconds."""

    one_step: float | None  # None: not offered
    spread: float | None = None  # None: not offered
    spread_steps: int = 0

    @property
    def cheapest(self) -> float:
        """The cheaper way."""
        return min(seconds for seconds in (self.one_step, self.spread) if seconds is not None)


class Costs(Protocol):
    """Predicts steps and switches: a cost model, or measured tables."""

    def step_seconds(self, load: Load) -> Mapping[Layout, float]:
        """Seconds of one step of this load in every layout."""
        ...

    def switch_seconds(self, src: Layout, load: Load) -> Mapping[Layout, SwitchCost]:
        """What a switch from `src` to every other layout adds to a step of this load."""
        ...


@dataclass(slots=True, kw_only=True)
class Observer:
    """Takes snapshots: the costs, the room of every layout, and what experience corrects them by."""

    costs: Costs
    room: Room  # pages of every layout that programs exist for
    slots: int  # requests that may run at once
    chunks: Sequence[int] = (512,)  # prompt rows per step to choose among; the last: as many as a bucket holds
    directions: Collection[tuple[Layout, Layout]] | None = None  # switches that may be made; None: all
    residuals: Residuals = field(default_factory=Residuals)
    lifetimes: Lifetimes = field(default_factory=Lifetimes)
    flow: Flow = field(default_factory=Flow)
    _begun: Begun = field(default_factory=Begun)  # that the flow has counted

    def snapshot(
        self, scheduler: Scheduler, pool: PagePool, *, step: int, time: float, policy: PolicyConfig, memory: Memory,
        steps: int = 1,
    ) -> Snapshot:  # fmt: skip
        """What `decide` decides from. `step` and `time` are of the step that comes next, `steps` since the last one."""
        running, here = scheduler.running, pool.layout
        if here not in self.room.pages:
            raise PolicyError(f"layout {here} is not among those with quotes: {', '.join(map(str, self.room.pages))}.")
        for name in (policy.pin, *(policy.allowed or ())):
            if name is not None and name not in (names := [str(one) for one in self.room.pages]):
                raise PolicyError(
                    f"the policy's {name!r} is none of the layouts that programs exist for: {', '.join(names)}."
                )
        self._count(scheduler, steps)
        live = _Live.of(running, pool)
        load = live.load()
        rows = int(load.new_rows.sum()) - int((load.new_rows == 1).sum())
        kind = "prefill" if rows else "decode"
        needed = self.room.needed(load)
        lacking = self._lacking(load, needed, pool)
        waiting = list(islice(scheduler.waiting, min(LOOK_AHEAD, self.slots - len(running))))
        admitted = {one: self._admits(one, load, needed[one], waiting) for one, lack in lacking.items() if not lack}
        choices = self._choices(load, waiting, admitted, kind, bounded=policy.step_seconds is not None)
        ways = self._ways(here, load, waiting)
        quotes = [
            self._quote(layout, choices.get(layout, ()), lack, ways.get(layout)) for layout, lack in lacking.items()
        ]
        lasts, at_most = self._how_long(live)
        return Snapshot(
            step=step, time=time, layout=str(here), quotes=tuple(quotes), requests=len(running),
            waiting=len(scheduler.waiting), tokens=int((load.context - load.new_rows).sum()), prompt_rows=rows,
            steps=steps, lasts=None if waiting else lasts, at_most=None if waiting else at_most,
            distrust=self.residuals.distrust(), policy=policy, memory=memory,
        )  # fmt: skip

    def _count(self, scheduler: Scheduler, steps: int) -> None:
        begun = scheduler.begun
        prompts, rows, draws = (now - then for now, then in zip(begun, self._begun, strict=True))
        self.flow, self._begun = self.flow.after(steps, prompts, rows, draws), begun

    def _lacking(self, load: Load, needed: Mapping[Layout, np.ndarray], pool: PagePool) -> dict[Layout, str]:
        """For every layout why it cannot be switched to, or cannot hold what runs; or ""."""
        found = {}
        for layout, pages in self.room.pages.items():
            need = needed[layout]
            if need.max(initial=0) > pages and layout != pool.layout and free_axes(pool.layout, layout):
                need = self.room.needed(_dealt(load, layout.size))[layout]  # homes are chosen anew at this switch
            worst = int(need.argmax())
            short = int(need[worst]) - pages
            if layout == pool.layout:
                found[layout] = ""
            elif self.directions is not None and (pool.layout, layout) not in self.directions:
                found[layout] = f"no switch {pool.layout} -> {layout} is among the engine's directions"
            else:
                found[layout] = "" if short <= 0 else f"rank {worst} lacks {short} pages"
        return found

    def _admits(self, layout: Layout, load: Load, needed: np.ndarray, waiting: Sequence[Request]) -> int:
        """How many of the waiting requests, in order, a layout has room for beside what runs: a page to spare for each.

        The requests that run have their homes; each further one goes where most is free, as the scheduler sends it.
        """
        if not waiting:
            return 0
        kv, groups = self.room.kv, layout.owner_groups
        group_of, fullest = np.array(groups_of_ranks(layout)), np.zeros(groups, np.int64)
        np.maximum.at(fullest, group_of, needed.astype(np.int64))
        spare = np.bincount(group_of[load.home], minlength=groups)
        taken = fullest + spare - self.room.pages[layout]
        free = list(zip(taken.tolist(), range(groups), strict=True))
        heapq.heapify(free)  # least is most free
        for count, request in enumerate(waiting):
            used, group = free[0]
            used += kv.pages_held(layout, 0, request.known) + 1
            if used > 0:
                return count
            heapq.heapreplace(free, (used, group))
        return len(waiting)

    def _choices(
        self, load: Load, waiting: Sequence[Request], admitted: Mapping[Layout, int], kind: str, bounded: bool
    ) -> dict[Layout, tuple[Choice, ...]]:
        """Steps of every layout that has room. Where their length is to be `bounded`, with each size of chunk."""
        prompts, ranks = bool((load.new_rows > 1).any()), next(iter(self.room.pages)).size
        bounded = bounded and (prompts or bool(waiting))
        sizes = self.chunks if bounded else self.chunks[-1:]
        lengths = [request.known for request in waiting]
        flows = self.flow.steps(len(load), 1, 1) is not None
        found: dict[Layout, list[Choice]] = {layout: [] for layout in admitted}
        batch, seconds = load, dict[int, Mapping[Layout, float]]()
        for size in sizes:
            if prompts or flows or size == sizes[0]:  # without prompts all sizes compare alike
                batch = Load(load.context, np.ones_like(load.context), load.home) if flows else _cut(load, size)
                batches = {count: _with(batch, lengths[:count], ranks) for count in set(admitted.values())}
                seconds = {count: self._mean_seconds(each, size) for count, each in batches.items() if len(each)}
            longest: dict[int, Mapping[Layout, float] | None] = dict.fromkeys(seconds)
            if bounded:  # what is admitted begins with its prompt
                for count in seconds:
                    first = _with(load, lengths[: max(1, count)], ranks, prompts=True)
                    longest[count] = self.costs.step_seconds(_cut(first, size))
            for layout, count in admitted.items():
                if count in seconds:
                    name, most = str(layout), longest[count]
                    most = None if most is None else most[layout] * self.residuals.factor(name, "prefill")
                    corrected = seconds[count][layout] * self.residuals.factor(name, kind)
                    tokens = float(int(batch.new_rows.sum()) + count)
                    found[layout].append(Choice(corrected, tokens, size if prompts or count or bounded else 0, most))
        return {layout: tuple(made) for layout, made in found.items()}

    def _mean_seconds(self, batch: Load, chunk: int) -> Mapping[Layout, float]:
        """Of a step of the batch in every layout, with the prompts that flow in."""
        plain = self.costs.step_seconds(batch)
        alike: dict[PromptSteps, list[Layout]] = {}
        for layout in plain:
            groups = layout.owner_groups
            if (found := self.flow.steps(len(batch), max(1, chunk // groups), groups)) is not None:
                alike.setdefault(found, []).append(layout)
        mean = dict(plain)
        for found, layouts in alike.items():
            chunks = _with(batch, found.contexts, layouts[0].size, rows=found.rows)
            mixed = self.costs.step_seconds(chunks)
            mean |= {one: plain[one] + found.weight * (mixed[one] - plain[one]) for one in layouts}
        return mean

    def _ways(self, here: Layout, load: Load, waiting: Sequence[Request]) -> dict[Layout, tuple[SwitchCost, float]]:
        """For every other layout: the switch there, and the way back. Where nothing runs yet, in the first prompt."""
        if not len(load):
            if not waiting:
                return {}
            rows = np.array([waiting[0].known], np.int64)
            load = Load(rows, rows, np.zeros_like(rows))
        there = self.costs.switch_seconds(here, load)
        return {one: (way, self.costs.switch_seconds(one, load)[here].cheapest) for one, way in there.items()}

    def _quote(
        self, layout: Layout, choices: tuple[Choice, ...], lack: str, way: tuple[SwitchCost, float] | None
    ) -> Quote:
        refused = lack or ("" if choices else "it has no room for what waits")
        if refused or way is None:
            return Quote(str(layout), () if refused else choices, refused)
        there, back = way
        return Quote(str(layout), choices, "", there.one_step, back, there.spread, there.spread_steps)

    def _how_long(self, live: "_Live") -> tuple[float | None, float | None]:
        if not len(live.output):
            return None, None
        generated = live.output + live.in_flight
        left = live.max_total - live.prompt - generated
        longest, every = int(left.max()), max(1, len(left) // SAMPLED)
        half = self.lifetimes.until_half(generated[::every], left[::every])
        return half, float(longest) if longest < FOREVER else None


class _Live(NamedTuple):
    """The running requests as arrays, i64[B] each."""

    prompt: np.ndarray  # tokens
    output: np.ndarray  # tokens that are read
    in_flight: np.ndarray  # ... and that are being drawn
    computed: np.ndarray
    max_total: np.ndarray
    home: np.ndarray

    @classmethod
    def of(cls, running: Sequence[Request], pool: PagePool) -> "_Live":
        each = [
            (len(r.prompt_ids), len(r.output_ids), r.in_flight, r.computed, r.max_total, pool.home(r.name))
            for r in running
        ]
        return cls(*np.array(each, np.int64).reshape(-1, len(cls._fields)).T)

    def load(self) -> Load:
        """As the next step sees them: one row of each that draws, all missing rows of a prompt."""
        rows = np.maximum(1, self.prompt + self.output - self.computed)
        return Load(self.computed + rows, rows, self.home)


def _dealt(load: Load, ranks: int) -> Load:
    """The same requests with homes dealt out evenly, longest first, there and back over the ranks."""
    home = np.empty(len(load), np.int64)
    turn = np.arange(len(load)) % (2 * ranks)
    home[np.argsort(-load.context, kind="stable")] = np.where(turn < ranks, turn, 2 * ranks - 1 - turn)
    return Load(load.context, load.new_rows, home)


def _cut(load: Load, chunk: int) -> Load:
    """The load of a step with at most `chunk` prompt rows, oldest requests first; those without rows wait."""
    prompt = np.where(load.new_rows > 1, load.new_rows, 0)
    room = np.maximum(0, chunk - (np.cumsum(prompt) - prompt))
    rows = np.where(load.new_rows > 1, np.minimum(prompt, room), load.new_rows)
    keep = rows > 0
    context = load.context - load.new_rows + rows
    return Load(context[keep], rows[keep], load.home[keep])


def chunk_sizes(rows: int, tile: int) -> tuple[int, ...]:
    """Prompt rows per step worth choosing among: `rows`, and halves of it down to a tile, in whole tiles."""
    return tuple(sorted({-(-rows // (tile << k)) * tile for k in range(CHUNKS)}))


def _with(load: Load, lengths: Sequence[int], ranks: int, rows: int | None = None, prompts: bool = False) -> Load:
    """The load with further requests of so many tokens, whose homes are dealt out where the fewest are.

    They draw; or so many `rows` of them are new; or, where they are `prompts`, all are.
    """
    if not lengths:
        return load
    count = np.bincount(load.home, minlength=ranks)
    order = np.argsort(count, kind="stable")
    more = np.array(lengths, np.int64)
    home = np.resize(order, len(more))
    new = more if prompts else np.full_like(more, 1 if rows is None else rows)
    return Load(
        np.concatenate([load.context, more if prompts or rows is not None else more + 1]),
        np.concatenate([load.new_rows, new]),
        np.concatenate([load.home, home]),
    )
