"""The one loop where decisions meet devices.

A step is scheduled and dispatched before the tokens of the step before it are read: `_pending` is that step. A request
that ended there has at most one row too many in flight, whose token nobody reads.
"""

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace

import jax
import numpy as np

from splash_jax.engine.build import Blueprint, Progress, build
from splash_jax.engine.config import AUTO, EngineConfig
from splash_jax.engine.interrupts import interrupts_held
from splash_jax.engine.pilot import Expected, Pilot, log_path, profile_of
from splash_jax.engine.records import Records, StepRecord, make_record
from splash_jax.engine.requests import check_request, stop_ids, with_tokenizer
from splash_jax.engine.stopping import Ending
from splash_jax.errors import EngineFailed, LayoutError, RequestError, SplashError, SwitchRefused
from splash_jax.kv import PagePool, TwinPool
from splash_jax.models.config import read_model_config, refuse_quantised
from splash_jax.models.tokenizer import Detokenizer, Tokenizer
from splash_jax.ownership import Bucket, Layout, Manifest, SwitchPlan, plan_between, plan_switch
from splash_jax.runtime import (
    Draw,
    ResetKey,
    Results,
    Side,
    Spread,
    Switch,
    SwitchMode,
    Work,
    build_batch,
    prepare_switch,
    run_spread_step,
    run_step,
)
from splash_jax.runtime.batch import Places
from splash_jax.runtime.sampler import PROMPT
from splash_jax.runtime.transfer import lacks_room
from splash_jax.scheduler import Chunk, Request, SamplingParams, Schedule, Scheduler, Status
from splash_jax.scheduler import Switch as Steered
from splash_jax.scheduler.params import GREEDY_BELOW

log = logging.getLogger("splash_jax")


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A dispatched step whose results are unread."""

    schedule: Schedule
    results: Results
    places: Places
    record: StepRecord
    started: float
    expected: Expected | None  # None where it is not to be compared: no policy, or a switch in it


@dataclass(slots=True, kw_only=True)
class _Spreading:
    """A spread switch under way, with the plan as it was at its start and the pages of both layouts."""

    spread: Spread
    plan: SwitchPlan
    twin: TwinPool


class Engine:
    """Requests in, tokens out, on one mesh, in a layout that may change between any two steps.

    Thread-safe: any thread may add, abort or switch; whoever calls `step` drives.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        model = read_model_config(config.model)  # of a folder that is no checkpoint this says more than the tokenizer
        refuse_quantised(model, config.model)
        self.tokenizer = None if config.skip_tokenizer_init else Tokenizer.open(config.model)
        model = with_tokenizer(model, self.tokenizer)
        hardware = profile_of(config) if config.layout == AUTO else None
        if hardware is not None and config.decision_log is not None:
            log_path(config.decision_log)  # before anything takes long
        self.blueprint: Blueprint
        self.blueprint, self.programs, self.state = build(config, progress, model)
        self.config, self.model = config, self.blueprint.model
        self.pool = PagePool(self.state.layout, self.blueprint.shapes.kv, self.state.pages)
        self.scheduler = Scheduler(config.max_num_seqs, lambda layout: self.blueprint.buckets[layout])
        self.pilot = None if hardware is None else Pilot(self.blueprint, hardware)
        self.records = Records()
        self._requests: dict[str, tuple[Request, Ending]] = {}
        self._scores: dict[str, list[np.ndarray]] = {}
        self._aborts: deque[str] = deque()
        self._switches: deque[tuple[Layout, SwitchMode, Future[SwitchPlan]]] = deque()  # the first may be under way
        self._spreading: _Spreading | None = None
        self._pending: _Pending | None = None
        self._lock = threading.RLock()
        self._read_at = 0.0
        self._count = 0
        self.preemptions = 0
        self._failed: BaseException | None = None
        self._unseeded = np.random.default_rng(config.seed)

    @property
    def layout(self) -> Layout:
        """The layout of the next step, unless a switch is asked for."""
        return self.state.layout

    @property
    def _pages(self) -> PagePool | TwinPool:
        """The pages that a request takes: of both layouts while a switch is spread over steps."""
        return self.pool if self._spreading is None else self._spreading.twin

    @property
    def max_model_len(self) -> int:
        return self.blueprint.shapes.max_model_len

    def add_request(
        self, name: str, prompt_ids: list[int], params: SamplingParams, *, sample: int = 0, seed: int | None = None,
        score: bool = False,
    ) -> Request:  # fmt: skip
        """Queue one sample of a prompt. Raises `RequestError`, before anything is taken, if it can never be served."""
        check_request(self.blueprint, prompt_ids, params, score, text=self.tokenizer is not None)
        limit = self.max_model_len
        with self._lock:
            self.raise_if_failed()
            if name in self._requests:
                raise RequestError(f"request id {name!r} is already in use; choose another.")
            if seed is None:
                seed = int(self._unseeded.integers(2**32)) if params.seed is None else params.seed
            request = Request(
                name=name,
                prompt_ids=[int(i) for i in prompt_ids],
                params=params,
                seed=seed,
                sample=sample,
                score=score,
                stop_ids=stop_ids(self.model, params),
                max_total=len(prompt_ids) if score else min(limit, len(prompt_ids) + (params.max_tokens or limit)),
            )
            detokenizer = None
            if self.tokenizer is not None and not score:
                detokenizer = Detokenizer(self.tokenizer, params.skip_special_tokens)
            self._requests[name] = (request, Ending(request, detokenizer))
            self.scheduler.add(request)
        return request

    def knows(self, name: str) -> bool:
        """Whether a request of this name is queued, runs, or is done and not yet taken."""
        return name in self._requests

    def abort(self, name: str) -> None:
        """End a request at the next step boundary; its pages are free then. Unknown or finished names do nothing."""
        self._aborts.append(name)

    def request_switch(self, dst: str, mode: str = "splash") -> "Future[SwitchPlan]":
        """Switch at the next step boundary. The future holds the plan carried out, or why nothing has changed:
        `SwitchRefused`, or `LayoutError` for a direction that the engine was not built for.
        """
        (layout, how), future = self.allowed_switch(dst, mode), Future()
        self.raise_if_failed()
        self._switches.append((layout, how, future))
        if self._failed is not None:  # just now, and perhaps without having seen this one
            self._fail_switches()
        return future

    def allowed_switch(self, dst: str, mode: str) -> tuple[Layout, SwitchMode]:
        """A switch's layout and mode by name; raises `LayoutError` for one that this engine was not built for."""
        if mode not in self.config.switch_modes:
            allowed = ", ".join(self.config.switch_modes)
            raise LayoutError(
                f"switch mode {mode!r} is not among the allowed {allowed}; build it in with switch_modes."
            )
        return self.allowed_layout(dst), SwitchMode(mode)

    def allowed_layout(self, name: str) -> Layout:
        """The layout of a name; raises `LayoutError` for one that this engine was not built for."""
        allowed = self.blueprint.layouts
        layout = None
        if isinstance(name, str):
            layout = allowed.get(name) or allowed.get(self.config.spelled_out(name))
        if layout is None:
            known = ", ".join(allowed)
            raise LayoutError(f"layout {name!r} is not among the allowed layouts {known}; build it in with layouts.")
        return layout

    def plan(self, dst: Layout, now: Manifest | None = None) -> SwitchPlan:
        """The switch to `dst` from what is stored now, or from `now`. Raises `SwitchRefused` when it does not fit."""
        with self._lock:
            homes = None
            if now is None:
                now, homes = self.pool.manifest(), self.scheduler.new_homes(self.pool, dst)
            return plan_switch(
                now, dst, pages_per_rank=self.blueprint.pages[dst], state=self.blueprint.state, homes=homes
            )

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.scheduler.unfinished or self._pending or self._switches or self._aborts)

    def step(self) -> None:
        """Dispatch one step and read the one before it. Does nothing when nothing is to be done.

        Raises `EngineFailed` when the step raises in its middle, and ever after: what it left cannot be trusted. Every
        request has ended with an error then, and its pages are free. A keyboard interrupt is raised after the step,
        which it leaves whole.
        """
        with interrupts_held(), self._lock:
            self.raise_if_failed()
            try:
                self._step()
            except BaseException as error:
                self._fail(error)
                if isinstance(error, Exception):
                    self.raise_if_failed()
                raise

    def raise_if_failed(self) -> None:
        """Raise `EngineFailed` if a step has failed."""
        if self._failed is not None:
            raise EngineFailed(f"a step failed ({self._failed!r}); build a new engine.") from self._failed

    def _fail(self, error: BaseException) -> None:
        """End all that waits for an answer with an error."""
        log.error("a step of the engine failed: %r", error)
        self._failed, self._pending = error, None
        for request, _ in self._requests.values():
            if request.status is not Status.FINISHED:
                request.error = f"the engine failed: {error!r}"
                self._finish(request, "error")
        for name in self.pool.manifest().requests:  # of a request that was just being admitted
            self._pages.release(name)
        self._fail_switches()

    def _fail_switches(self) -> None:
        with self._lock:
            while self._switches:
                _, _, future = self._switches.popleft()
                if future.running() or (not future.done() and future.set_running_or_notify_cancel()):
                    future.set_exception(EngineFailed(f"a step failed before this switch was made: {self._failed!r}"))

    def _step(self) -> None:
        self._apply_aborts()
        chunk = None if self.pilot is None else self._steer(self.pilot)
        switch = self._take_switch() if self._spreading is None else None
        if self._pending and self.scheduler.under_pressure(self._pages):
            self._read(self._pending)
            self._pending = None
        switching = switch is not None and switch.mode is SwitchMode.SPLASH
        schedule = self.scheduler.schedule(self._pages, switching, chunk)
        self.preemptions += len(schedule.preempted)
        before, self._pending = self._pending, None
        if self._spreading is not None:
            self._pending = self._dispatch_spread(schedule, self._spreading)
        elif schedule.chunks or switch is not None:
            self._pending = self._dispatch(schedule, switch)
        if switch is not None:
            self._switches.popleft()[2].set_result(switch.plan)
        if before is not None:
            self._read(before)
        if not self.scheduler.unfinished and self._pending is None:
            self.pool.check(live=())

    def _steer(self, pilot: Pilot) -> int | None:
        """Ask the policy about the next step: its switch is queued. Returns the most prompt rows of the step."""
        if self._switches or not self.scheduler.unfinished:
            return pilot.chunk  # a switch that someone asked for, or that is under way, comes first
        action = pilot.steer(self.scheduler, self.pool, self._count).action
        if isinstance(action, Steered):
            future = Future()
            future.add_done_callback(pilot.told)
            self._switches.append((self.allowed_layout(action.layout), pilot.mode(action), future))
        return pilot.chunk

    def take(self, name: str) -> tuple[Request, str, np.ndarray | None]:
        """A finished request, its text and (if it was scored) its logits f32[len, V]; forgets it.

        Raises `RequestError` for a name that is unknown or not done.
        """
        with self._lock:
            if name not in self._requests:
                raise RequestError(f"no request is named {name!r}, or its result was taken already.")
            request, ending = self._requests[name]
            if request.status is not Status.FINISHED:
                raise RequestError(
                    f"request {name!r} is {request.status.value}: step until it is finished, or drop it."
                )
            del self._requests[name]
            rows = self._scores.pop(name, None)
        return request, ending.text, None if rows is None else np.concatenate(rows)

    def drop(self, name: str) -> None:
        """End a request whose result nobody wants, wherever it is, and forget it."""
        with self._lock:
            known = self._requests.pop(name, None)
            self._scores.pop(name, None)
            if known and known[0].status is not Status.FINISHED:
                self._finish(known[0], "abort")

    def _apply_aborts(self) -> None:
        while self._aborts:
            known = self._requests.get(self._aborts.popleft())
            if known and known[0].status is not Status.FINISHED:
                self._finish(known[0], "abort")

    def _take_switch(self) -> Switch | None:
        """The next switch that can be made; the page pool is as after it, and its order the first of the queue."""
        while self._switches:
            dst, mode, future = self._switches[0]
            if future.set_running_or_notify_cancel():
                try:
                    if dst != self.layout:
                        return self._begin_switch(dst, mode)
                    future.set_result(self.plan(dst))
                except SplashError as refusal:
                    future.set_exception(refusal)
                except Exception as error:
                    refusal = SwitchRefused(f"switch {self.layout} -> {dst} could not be prepared: {error!r}")
                    refusal.__cause__ = error
                    future.set_exception(refusal)
            self._switches.popleft()
        return None

    def _begin_switch(self, dst: Layout, mode: SwitchMode) -> Switch | None:
        """A switch with its maps on the devices, or None once a spread one is under way.

        Until the last line nothing has changed, whatever raises.
        """
        if (self.layout, dst) not in self.blueprint.directions():
            known = ", ".join(f"{src} -> {to}" for src, to in self.blueprint.directions())
            raise LayoutError(f"switch {self.layout} -> {dst} is not among the engine's directions {known}.")
        plan, route = self.plan(dst), self.blueprint.route(self.layout, dst)
        if reason := lacks_room(route, plan.kv):
            raise SwitchRefused(f"switch {self.layout} -> {dst} does not fit its compiled transfer: {reason}")
        if mode is SwitchMode.SPREAD and not route.moves_nothing:
            spread = Spread(route, self.config.spread_layers, self.config.spread_parts)
            twin = TwinPool(self.pool, PagePool.adopt(plan.after))
            self._spreading = _Spreading(spread=spread, plan=plan, twin=twin)
            return None
        switch = prepare_switch(self.programs, plan, route, mode)
        self.pool = PagePool.adopt(plan.after)
        return switch

    def _dispatch(self, schedule: Schedule, switch: Switch | None) -> _Pending:
        started = time.perf_counter()
        works, score = self._begin_chunks(schedule)
        bucket = self.blueprint.buckets[self.pool.layout][-1] if score else schedule.bucket
        batch, places = build_batch(self.blueprint.shapes, self.pool.layout, bucket, self.pool, works)
        results = run_step(self.programs, self.state, bucket, batch, score=score, switch=switch)
        self._end_chunks(schedule)
        record = self._record(schedule, bucket)
        if switch is not None:
            record = replace(record, switch=switch.plan, switch_mode=str(switch.mode))
        expected = None if self.pilot is None or switch is not None else self.pilot.expect(schedule, self.pool)
        return _Pending(
            schedule=schedule, results=results, places=places, record=record, started=started, expected=expected
        )

    def _dispatch_spread(self, schedule: Schedule, spreading: _Spreading) -> _Pending:
        """A step of a spread switch; after the last one the pool is the destination's."""
        started, spread, twin = time.perf_counter(), spreading.spread, spreading.twin
        ahead, last = spread.boundary, spread.complete(self.model.num_layers)
        works, score = self._begin_chunks(schedule)
        src, dst = (
            self._side(pool, self.blueprint.buckets[pool.layout][-1] if score else bucket, works)
            for pool, bucket in zip((twin.src, twin.dst), schedule.buckets, strict=True)
        )
        moves = None if last else plan_between(twin.src.manifest(), twin.dst.manifest(), self.blueprint.state)
        results = run_spread_step(self.programs, self.state, spread, src, dst, moves, score=score)
        self._end_chunks(schedule)
        if last:
            self.pool, self._spreading = twin.dst, None
            self._switches.popleft()[2].set_result(spreading.plan)
        head = dst if last else src
        record = replace(
            self._record(schedule, head.bucket),
            layers_ahead=ahead,
            switch=spreading.plan if last else None,
            switch_mode=str(SwitchMode.SPREAD),
        )
        return _Pending(
            schedule=schedule, results=results, places=head.places, record=record, started=started, expected=None
        )

    def _side(self, pool: PagePool, bucket: Bucket, works: list[Work]) -> Side:
        batch, places = build_batch(self.blueprint.shapes, pool.layout, bucket, pool, works)
        return Side(pool.layout, pool.pages_per_rank, bucket, batch, places)

    def _begin_chunks(self, schedule: Schedule) -> tuple[list[Work], bool]:
        """What the step does for each request, and whether any is scored."""
        for chunk in schedule.chunks:
            if chunk.start == 0 and chunk.request.params.penalised:
                self._reset_counts(chunk.request)
        works = [self._work(chunk) for chunk in schedule.chunks]
        return works, any(chunk.request.score for chunk in schedule.chunks)

    def _end_chunks(self, schedule: Schedule) -> None:
        for chunk in schedule.chunks:
            chunk.request.computed += chunk.rows
            chunk.request.in_flight += chunk.draws

    def _work(self, chunk: Chunk) -> Work:
        request, params = chunk.request, chunk.request.params
        stop = chunk.start + chunk.rows
        ids = np.asarray(request.ids(chunk.start, stop), np.int32) if stop <= request.known else None
        draw = None
        if chunk.draws:
            token = request.total - len(request.prompt_ids)
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

    def _reset_counts(self, request: Request) -> None:
        row = np.bincount(request.output_ids, minlength=self.model.vocab_size).astype(np.int32)
        row[np.unique(request.prompt_ids)] += PROMPT
        self.state.sampler = self.programs.get(ResetKey())(self.state.sampler, np.int32(request.slot), row)

    def _read(self, pending: _Pending) -> None:
        """Wait for a step's tokens and give them to their requests."""
        tokens, logprobs, logits = jax.device_get(
            (pending.results.drawn.tokens, pending.results.drawn.logprobs, pending.results.logits)
        )
        now = time.perf_counter()
        for chunk in pending.schedule.chunks:
            request = chunk.request
            request.in_flight -= chunk.draws
            if request.status is Status.FINISHED:
                continue
            if request.score:
                rows = logits[pending.places.rows[request.name], : self.model.vocab_size]
                if chunk.start == 0:  # begun, or begun again after giving its pages back
                    self._scores[request.name] = []
                self._scores[request.name].append(rows)
                if chunk.start + chunk.rows == request.known:
                    self._finish(request, "stop")
            elif chunk.draws:
                self._take_token(request, *(x[pending.places.sampled[request.name]] for x in (tokens, logprobs)))
        seconds = now - max(pending.started, self._read_at)
        self._read_at = now
        self.records.append(replace(pending.record, seconds=seconds))
        if self.pilot is not None and pending.expected is not None:
            self.pilot.observe(pending.expected, seconds)

    def _take_token(self, request: Request, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        token = int(tokens[0])
        if token < 0:
            request.error = "the model's logits were not finite, so no token could be drawn."
            self._finish(request, "error")
            return
        if request.params.logprobs is not None:
            k = min(request.params.logprobs, self.model.vocab_size)
            top = [(int(i), float(p)) for i, p in zip(tokens[1 : k + 1], logprobs[1 : k + 1], strict=True)]
            request.logprobs.append((float(logprobs[0]), top))
        try:
            self._requests[request.name][1].add(token)
        except Exception as error:  # the tokenizer's: this request's own trouble
            log.warning("request %r ended: token %d could not be turned into text: %r", request.name, token, error)
            request.error = f"token {token} could not be turned into text: {error!r}"
            request.finish_reason = "error"
        if request.finish_reason is not None:
            self._finish(request, request.finish_reason)

    def _finish(self, request: Request, reason: str) -> None:
        self.scheduler.finish(self._pages, request)
        request.finish_reason = reason
        if self.pilot is not None:
            self.pilot.finished(request)

    def _record(self, schedule: Schedule, bucket: Bucket) -> StepRecord:
        self._count += 1
        return make_record(self._count - 1, self.blueprint, self.scheduler, self.pool, schedule, bucket)
