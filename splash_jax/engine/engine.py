"""The one loop where decisions meet devices.

A step is scheduled and dispatched before the tokens of the step before it are read: `_pending` is that step. A request
that ended there has at most one row too many in flight, whose token nobody reads.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np

from splash_jax.engine.build import Blueprint, Progress, build
from splash_jax.engine.config import AUTO, EngineConfig
from splash_jax.engine.interrupts import interrupts_held
from splash_jax.engine.pilot import Pilot, log_path, profile_of
from splash_jax.engine.records import Records
from splash_jax.engine.requests import check_request, stop_ids, whole, with_tokenizer
from splash_jax.engine.steps import Attempt, Pending, Ready, Spreading, Steps
from splash_jax.engine.stopping import Ending
from splash_jax.errors import EngineFailed, LayoutError, RequestError, SplashError, SwitchRefused
from splash_jax.kv import PagePool, TwinPool
from splash_jax.models.config import read_model_config, refuse_quantised
from splash_jax.models.tokenizer import Detokenizer, Tokenizer
from splash_jax.ownership import Layout, Manifest, SwitchPlan, plan_switch
from splash_jax.runtime import Spread, Switch, SwitchMode, check_settings, own_settings, prepare_switch
from splash_jax.runtime.batch import Places
from splash_jax.runtime.transfer import lacks_room
from splash_jax.scheduler import Chunk, Request, SamplingParams, Scheduler, Status
from splash_jax.scheduler import Switch as Steered

log = logging.getLogger("splash_jax")
MOST_FUTILE = 3  # steps in a row that may fail with no request to end: then each later one would, too


class Engine:
    """Requests in, tokens out, on one mesh, in a layout that may change between any two steps.

    Thread-safe: any thread may add, abort or switch; whoever calls `step` drives.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        check_settings()
        model = read_model_config(config.model)  # of a folder that is no checkpoint this says more than the tokenizer
        refuse_quantised(model, config.model)
        self.tokenizer = None if config.skip_tokenizer_init else Tokenizer.open(config.model)
        model = with_tokenizer(model, self.tokenizer)
        hardware = profile_of(config) if config.layout == AUTO else None
        if hardware is not None and config.decision_log is not None:
            log_path(config.decision_log)  # before anything takes long
        self.blueprint: Blueprint
        with own_settings():
            self.blueprint, self.programs, self.state = build(config, progress, model)
        self.config, self.model = config, self.blueprint.model
        self.pool = PagePool(self.state.layout, self.blueprint.shapes.kv, self.state.pages)
        self.scheduler = Scheduler(config.max_num_seqs, self.blueprint.buckets.__getitem__)
        self._steps = Steps(self.blueprint, self.programs, self.state, self.scheduler)
        self.pilot = None if hardware is None else Pilot(self.blueprint, hardware)
        self.records = Records()
        self._requests: dict[str, tuple[Request, Ending]] = {}
        self._scores: dict[str, list[np.ndarray]] = {}
        self._aborts: deque[str] = deque()
        self._switches: deque[tuple[Layout, SwitchMode, Future[SwitchPlan]]] = deque()  # the first may be under way
        self._spreading: Spreading | None = None
        self._pending: Pending | None = None
        self._lock = threading.RLock()
        self._read_at = 0.0
        self._count = 0
        self._futile = 0  # steps since the last dispatch that failed with no request to end
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
    def _pools(self) -> tuple[PagePool, ...]:
        """The pools that `_pages` is of."""
        return (self.pool,) if self._spreading is None else (self._spreading.twin.src, self._spreading.twin.dst)

    @property
    def max_model_len(self) -> int:
        return self.blueprint.shapes.max_model_len

    def add_request(
        self, name: str, prompt_ids: list[int], params: SamplingParams, *, sample: int = 0, seed: int | None = None,
        score: bool = False,
    ) -> Request:  # fmt: skip
        """Queue one sample of a prompt. Raises `RequestError`, before anything is taken, if it can never be served.

        `sample` says which sample of its seed it draws; `seed` stands above that of `params`.
        """
        sample, seed = whole("sample", sample, 31), None if seed is None else whole("seed", seed, 63)
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
            if isinstance(name, str):
                self.config.layout_of(name)  # which says so where there is none of this name
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

        What raises before the dispatch has changed nothing: the request that it is about ends with an error, or else
        the step's switch is refused and the step made without it, or else its requests end with an error. All others
        go on. Raises `EngineFailed` when the step raises after that, and ever after: what it left cannot be trusted.
        Every request has ended with an error then, and its pages are free. A keyboard interrupt is raised after the
        step, which it leaves whole.
        """
        with interrupts_held(), self._lock, own_settings():
            self.raise_if_failed()
            with self._or_fail():
                interrupt = self._step()
        if interrupt is not None:
            raise interrupt

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
        for pool in self._pools:
            for name in pool.manifest().requests:  # of a request that was just being admitted
                pool.release(name)
        self._fail_switches()

    def _fail_switches(self) -> None:
        with self._lock:
            while self._switches:
                _, _, future = self._switches.popleft()
                if future.running() or (not future.done() and future.set_running_or_notify_cancel()):
                    future.set_exception(EngineFailed(f"a step failed before this switch was made: {self._failed!r}"))

    @contextmanager
    def _or_fail(self) -> Iterator[None]:
        """Around what leaves the engine's state unknown if it raises."""
        try:
            yield
        except BaseException as error:
            if self._failed is None:
                self._fail(error)
            if isinstance(error, Exception):
                self.raise_if_failed()
            raise

    def _step(self, asking: bool = True) -> BaseException | None:
        """One step; the interrupt that kept it from its dispatch, if one did. `asking`: the policy is asked."""
        attempt = Attempt(pool=self.pool)
        try:
            ready = self._prepare(attempt, asking)
        except BaseException as error:
            if self._failed is not None:
                raise
            again = self._withdraw(attempt, error)
            interrupt = None if isinstance(error, Exception) else error
        else:
            self._finish_step(ready)
            return None
        return self._step(asking=False) if again else interrupt

    def _prepare(self, attempt: Attempt, asking: bool) -> Ready | None:
        """All of a step but its dispatch; None where there is nothing to run. What it raises can be taken back."""
        self._apply_aborts(attempt)
        chunk = None if self.pilot is None else self._steer(self.pilot) if asking else self.pilot.chunk
        attempt.switch = self._take_switch() if self._spreading is None else None
        if self._pending and self.scheduler.under_pressure(self._pages):
            with self._or_fail():
                self._read_pending()
        switching = attempt.switch is not None and attempt.switch.mode is SwitchMode.SPLASH
        attempt.schedule = self.scheduler.schedule(self._pages, switching, chunk)
        self.preemptions += len(attempt.schedule.preempted)
        self._tell_waiting()
        if self._spreading is not None:
            return self._steps.spread(self._count, attempt, attempt.schedule, self._spreading)
        if attempt.schedule.chunks or attempt.switch is not None:
            return self._steps.ordinary(self._count, attempt, attempt.schedule, self.pool, self.pilot)
        return None

    def _tell_waiting(self) -> None:
        waiting = self.scheduler.waiting_for
        if waiting is not None and not waiting.request.told:
            waiting.request.told = True
            level = logging.INFO if waiting.what == "pages" else logging.DEBUG
            log.log(level, "%s, and waits with %d behind it", waiting, len(self.scheduler.waiting) - 1)

    def _finish_step(self, ready: Ready | None) -> None:
        """Dispatch a step, and read the one before."""
        before, self._pending = self._pending, None
        if ready is not None:
            self._pending = self._dispatch(ready)
        if before is not None:
            self._read(before)
        if not self.scheduler.unfinished and self._pending is None:
            self.pool.check(live=())

    def _dispatch(self, ready: Ready) -> Pending:
        for reset in ready.resets:
            self.state.sampler = reset.program(self.state.sampler, reset.slot, reset.counts)
        results = ready.dispatch()
        self._futile = 0
        self._count += 1
        for chunk in ready.schedule.chunks:
            chunk.request.computed += chunk.rows
            chunk.request.in_flight += chunk.draws
        if ready.ends is not None:
            if self._spreading is not None:
                self.pool, self._spreading = self._spreading.twin.dst, None
            self._switches.popleft()[2].set_result(ready.ends)
        return Pending(
            schedule=ready.schedule, results=results, places=ready.places, record=ready.record, started=ready.started,
            expected=ready.expected,
        )  # fmt: skip

    def _withdraw(self, attempt: Attempt, fault: BaseException) -> bool:
        """Take back a step that failed before its dispatch. The request at fault ends; an interrupt ends none.

        True where its switch was refused, so that the step may come without it.
        """
        spreading, scheduler = self._spreading, self.scheduler
        about = attempt.about or scheduler.handling
        self.pool = attempt.pool
        scheduler.withdraw(self._pools, attempt.schedule)
        if not isinstance(fault, Exception):
            return False
        log.error("a step could not be prepared, and nothing has changed: %r", fault, exc_info=fault)
        self._read_pending()
        refusable = attempt.switch is not None or (spreading is not None and spreading.spread.boundary == 0)
        if refusable and len(about) != 1:
            self._spreading = None
            dst, _, future = self._switches.popleft()
            refusal = SwitchRefused(f"switch {self.layout} -> {dst} was not begun, its step failed before: {fault!r}")
            refusal.__cause__ = fault
            future.set_exception(refusal)
            return True
        if not about and attempt.schedule is not None:
            about = [chunk.request for chunk in attempt.schedule.chunks]
        about = about or scheduler.running or list(scheduler.waiting)[:1]
        if not about:  # no request to end
            self._futile += 1
            if self._futile == MOST_FUTILE:
                raise fault
            return False
        for request in [request for request in about if request.status is not Status.FINISHED]:
            request.error = f"a step with this request could not be prepared: {fault!r}. The engine runs on."
            self._finish(request, "error")
        return False

    def _steer(self, pilot: Pilot) -> int | None:
        """Ask the policy about the next step: its switch is queued. Returns the most prompt rows of the step."""
        if self._switches or not self.scheduler.unfinished:
            return pilot.chunk  # a switch that someone asked for, or that is under way, comes first
        with pilot.going_on():
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

    def _apply_aborts(self, attempt: Attempt) -> None:
        while self._aborts:
            known = self._requests.get(self._aborts[0])
            if known and known[0].status is not Status.FINISHED:
                attempt.about = [known[0]]
                self._finish(known[0], "abort")
            self._aborts.popleft()
        attempt.about = []

    def _take_switch(self) -> Switch | None:
        """The next switch that can be made; the page pool is as after it, and its order the first of the queue."""
        while self._switches:
            dst, mode, future = self._switches[0]
            if future.done() or not (future.running() or future.set_running_or_notify_cancel()):
                self._switches.popleft()
                continue
            refusal: Exception | None = None  # running already: taken by a step that was withdrawn
            plan: SwitchPlan | None = None
            try:
                if dst != self.layout:
                    return self._begin_switch(dst, mode)
                plan = self.plan(dst)
            except SplashError as error:
                refusal = error
            except Exception as error:
                refusal = SwitchRefused(f"switch {self.layout} -> {dst} could not be prepared: {error!r}")
                refusal.__cause__ = error
            self._switches.popleft()  # before it is answered: what a callback raises finds it gone
            if refusal is not None:
                future.set_exception(refusal)
            elif plan is not None:
                future.set_result(plan)
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
            self._spreading = Spreading(spread=spread, plan=plan, twin=twin)
            return None
        switch = prepare_switch(self.programs, plan, route, mode)
        self.pool = PagePool.adopt(plan.after)
        return switch

    def _read_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._read(pending)

    def _read(self, pending: Pending) -> None:
        """Wait for a step's tokens and give them to their requests."""
        values = jax.device_get((pending.results.drawn.tokens, pending.results.drawn.logprobs, pending.results.logits))
        now = time.perf_counter()
        for chunk in pending.schedule.chunks:
            request = chunk.request
            request.in_flight -= chunk.draws
            if request.status is Status.FINISHED:
                continue
            try:
                self._give(pending.places, chunk, *values)
            except Exception as error:  # this request's own trouble
                log.warning("request %r ended: its results could not be taken: %r", request.name, error)
                request.error = f"its results could not be taken: {error!r}"
                if request.status is not Status.FINISHED:
                    self._finish(request, "error")
        seconds = now - max(pending.started, self._read_at)
        self._read_at = now
        self.records.append(replace(pending.record, seconds=seconds))
        if self.pilot is not None and pending.expected is not None:
            self.pilot.observe(pending.expected, seconds)

    def _give(
        self, places: Places, chunk: Chunk, tokens: np.ndarray, logprobs: np.ndarray, logits: np.ndarray | None
    ) -> None:
        """Give a request what a step computed for it."""
        request = chunk.request
        if logits is not None and request.score:
            rows = logits[places.rows[request.name], : self.model.vocab_size]
            if chunk.start == 0:  # begun, or begun again after giving its pages back
                self._scores[request.name] = []
            self._scores[request.name].append(rows)
            if chunk.start + chunk.rows == request.known:
                self._finish(request, "stop")
        elif chunk.draws:
            self._take_token(request, *(x[places.sampled[request.name]] for x in (tokens, logprobs)))

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
