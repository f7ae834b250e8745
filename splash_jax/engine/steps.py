"""A step on its way to the devices: what it does for each request, and what it has taken until it is dispatched."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from splash_jax.engine.build import Blueprint
from splash_jax.engine.pilot import Expected, Pilot
from splash_jax.engine.records import StepRecord, make_record
from splash_jax.kv import PagePool, TwinPool
from splash_jax.ownership import Bucket, SwitchPlan, plan_between
from splash_jax.runtime import (
    DeviceState,
    Draw,
    Programs,
    ResetKey,
    Results,
    Side,
    Spread,
    Switch,
    SwitchMode,
    Work,
    build_batch,
    prepare_spread_step,
    prepare_step,
)
from splash_jax.runtime.batch import Places
from splash_jax.runtime.sampler import PROMPT
from splash_jax.scheduler import Chunk, Request, Schedule, Scheduler
from splash_jax.scheduler.params import GREEDY_BELOW


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A step before its dispatch. Should it fail here, this says what to give back and whom it was about."""

    pool: PagePool  # as it was before the step
    switch: Switch | None = None  # taken; the engine's pool is the destination's then
    schedule: Schedule | None = None
    about: list[Request] = field(default_factory=list)  # the request that is being handled, if it is one alone


class Reset(NamedTuple):
    """A slot's token counts, to be set before the step that begins its request."""

    program: Callable[..., Any]
    slot: np.int32
    counts: np.ndarray  # i32[V]


@dataclass(slots=True, kw_only=True)
class Ready:
    """A step of which only the dispatch is left. Until then nothing on the devices has changed."""

    schedule: Schedule
    resets: list[Reset]
    dispatch: Callable[[], Results]
    places: Places
    record: StepRecord
    started: float
    expected: Expected | None = None
    ends: SwitchPlan | None = None  # the switch that this step carries out, or is the last one of


@dataclass(slots=True, kw_only=True)
class Pending:
    """A dispatched step whose results are unread."""

    schedule: Schedule
    results: Results
    places: Places
    record: StepRecord
    started: float
    expected: Expected | None  # None where it is not to be compared: no policy, or a switch in it


@dataclass(slots=True, kw_only=True)
class Spreading:
    """A spread switch under way, with the plan as it was at its start and the pages of both layouts."""

    spread: Spread
    plan: SwitchPlan
    twin: TwinPool


class Steps:
    """Prepares the steps of an engine. Whatever raises in here has changed nothing on the devices."""

    def __init__(self, blueprint: Blueprint, programs: Programs, state: DeviceState, scheduler: Scheduler) -> None:
        self._blueprint, self._programs, self._state, self._scheduler = blueprint, programs, state, scheduler

    def ordinary(self, number: int, attempt: Attempt, schedule: Schedule, pool: PagePool, pilot: Pilot | None) -> Ready:
        """A step in the layout of `pool`, with the switch that was taken inside it."""
        started, switch = time.perf_counter(), attempt.switch
        works, resets = self._works(attempt, schedule)
        score = any(chunk.request.score for chunk in schedule.chunks)
        bucket = self._blueprint.buckets[pool.layout][-1] if score else schedule.bucket
        batch, places = build_batch(self._blueprint.shapes, pool.layout, bucket, pool, works)
        dispatch = prepare_step(self._programs, self._state, bucket, batch, score=score, switch=switch)
        record = self._record(number, schedule, bucket, pool)
        if switch is not None:
            record = replace(record, switch=switch.plan, switch_mode=str(switch.mode))
        return Ready(
            schedule=schedule, resets=resets, dispatch=dispatch, places=places, record=record, started=started,
            expected=None if pilot is None or switch is not None else pilot.expect(schedule, pool),
            ends=None if switch is None else switch.plan,
        )  # fmt: skip

    def spread(self, number: int, attempt: Attempt, schedule: Schedule, spreading: Spreading) -> Ready:
        """A step of a spread switch; after the last one the pool is the destination's."""
        started, spread, twin = time.perf_counter(), spreading.spread, spreading.twin
        ahead, last = spread.boundary, spread.complete(self._blueprint.model.num_layers)
        works, resets = self._works(attempt, schedule)
        score = any(chunk.request.score for chunk in schedule.chunks)
        src, dst = (
            self._side(pool, self._blueprint.buckets[pool.layout][-1] if score else bucket, works)
            for pool, bucket in zip((twin.src, twin.dst), schedule.buckets, strict=True)
        )
        moves = None if last else plan_between(twin.src.manifest(), twin.dst.manifest(), self._blueprint.state)
        dispatch = prepare_spread_step(self._programs, self._state, spread, src, dst, moves, score=score)
        head, pool = (dst, twin.dst) if last else (src, twin.src)
        record = self._record(number, schedule, head.bucket, pool)
        ends = spreading.plan if last else None
        return Ready(
            schedule=schedule, resets=resets, dispatch=dispatch, places=head.places, started=started, ends=ends,
            record=replace(record, layers_ahead=ahead, switch=ends, switch_mode=str(SwitchMode.SPREAD)),
        )  # fmt: skip

    def _side(self, pool: PagePool, bucket: Bucket, works: list[Work]) -> Side:
        batch, places = build_batch(self._blueprint.shapes, pool.layout, bucket, pool, works)
        return Side(pool.layout, pool.pages_per_rank, bucket, batch, places)

    def _works(self, attempt: Attempt, schedule: Schedule) -> tuple[list[Work], list[Reset]]:
        """What the step does for each request, and the slots whose token counts it sets before."""
        works, resets = [], []
        for chunk in schedule.chunks:
            attempt.about = [chunk.request]
            works.append(work_of(chunk))
            if chunk.start == 0 and chunk.request.params.penalised:
                counts = counts_of(chunk.request, self._blueprint.model.vocab_size)
                resets.append(Reset(self._programs.get(ResetKey()), np.int32(chunk.request.slot), counts))
        attempt.about = []
        return works, resets

    def _record(self, number: int, schedule: Schedule, bucket: Bucket, pool: PagePool) -> StepRecord:
        return make_record(number, self._blueprint, self._scheduler, pool, schedule, bucket)


def work_of(chunk: Chunk) -> Work:
    """What a step does for one request."""
    request, params = chunk.request, chunk.request.params
    stop = chunk.start + chunk.rows
    ids = np.asarray(request.ids(chunk.start, stop), np.int32) if stop <= request.known else None
    draw = None
    if chunk.draws:
        token = request.total - request.prompt_only
        draw = Draw(
            temperature=0.0 if params.temperature < GREEDY_BELOW else params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
            seed=request.seed,
            sample=request.sample,
            token=token,
            banned=tuple(sorted(request.stop_ids)) if token < params.min_tokens else (),
            top_logprobs=params.logprobs or 0,
        )
    return Work(name=request.name, slot=request.slot, start=chunk.start, ids=ids, draw=draw)


def counts_of(request: Request, vocabulary: int) -> np.ndarray:
    """A request's token counts as the sampler keeps them, i32[V]: of its output so far, marked where its prompt is."""
    prompt, resumed = request.prompt_ids[: request.prompt_only], request.prompt_ids[request.prompt_only :]
    row = np.bincount([*resumed, *request.output_ids], minlength=vocabulary).astype(np.int32)
    row[np.unique(prompt)] += PROMPT
    return row
