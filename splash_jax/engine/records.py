"""What an engine did, step by step: for logs, tables and plots."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from splash_jax.engine.build import Blueprint
from splash_jax.kv import PagePool
from splash_jax.ownership import Bucket, SwitchPlan
from splash_jax.scheduler import Schedule, Scheduler

KEPT = 65_536  # records that an engine holds, the latest


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step. Bytes are per rank; `seconds` runs from its dispatch, or the last step's results, to its results."""

    step: int
    layout: str
    bucket: str
    rows: int  # real rows, padding not counted
    drawn: int  # tokens drawn
    seconds: float
    running_by_home: tuple[int, ...]
    waiting: int  # requests
    pages_used: tuple[int, ...]
    pages_per_rank: int
    projection_bytes: int  # on every rank
    kv_bytes: int  # allocated on every rank
    transit_bytes: int  # kept free on every rank for one layer on the move
    idle_ranks: int  # ranks that own no row of this step, where requests have owners
    switch: SwitchPlan | None = None
    switch_mode: str | None = None  # how it was carried out
    layers_ahead: int = 0  # of a spread switch under way: layers that ran in its destination
    waiting_for: str | None = None  # what the first of those that wait lacks: slots, prompt rows or pages, and how many


class Records(Sequence[StepRecord]):
    """The records of an engine's steps, numbered from its first one on; only the latest `kept` are still here.

    `records[first:]` is what came since there were `first`, and iterating gives what is here.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._latest: deque[StepRecord] = deque(maxlen=kept)
        self._count = 0

    def append(self, record: StepRecord) -> None:
        self._latest.append(record)
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(tuple(self._latest))

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        gone = self._count - len(self._latest)
        if isinstance(index, slice):
            return [self._latest[i - gone] for i in range(*index.indices(self._count)) if i >= gone]
        place = index if index >= 0 else index + self._count
        if not gone <= place < self._count:
            raise IndexError(f"record {index} is not here: of {self._count} the latest {len(self._latest)} are kept.")
        return self._latest[place - gone]


def make_record(
    step: int, blueprint: Blueprint, scheduler: Scheduler, pool: PagePool, schedule: Schedule, bucket: Bucket
) -> StepRecord:
    """The record of a step that is about to be dispatched; its seconds are not known yet."""
    layout = pool.layout
    holds = blueprint.footprint(layout)
    running = [0] * layout.size
    for request in scheduler.running:
        running[pool.home(request.name)] += 1
    busy = {layout.group_of(pool.home(chunk.request.name)) for chunk in schedule.chunks}
    return StepRecord(
        step=step,
        layout=str(layout),
        bucket=str(bucket),
        rows=sum(chunk.rows for chunk in schedule.chunks),
        drawn=sum(chunk.draws for chunk in schedule.chunks),
        seconds=0.0,
        running_by_home=tuple(running),
        waiting=len(scheduler.waiting),
        pages_used=tuple(pool.pages_per_rank - n for n in pool.free_pages()),
        pages_per_rank=pool.pages_per_rank,
        projection_bytes=holds.projections,
        kv_bytes=holds.kv,
        transit_bytes=holds.transit,
        idle_ranks=sum(layout.group_of(rank) not in busy for rank in range(layout.size)),
        waiting_for=None if scheduler.waiting_for is None else str(scheduler.waiting_for),
    )
