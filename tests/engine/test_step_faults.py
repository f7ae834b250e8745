"""An exception before a step's dispatch ends the request it is about, or those of the step: the engine runs on."""

import re
from collections.abc import Callable
from typing import Any

import pytest

import splash_jax.engine.steps as steps_module
import splash_jax.runtime.execute as execute_module
import splash_jax.runtime.spread as spread_module
from splash_jax import LLM
from splash_jax.engine import Engine
from splash_jax.errors import RequestError, SwitchRefused
from splash_jax.kv import PagePool
from splash_jax.runtime import Programs, ResetKey, StepKey, SwitchKey
from splash_jax.runtime.keys import BeginKey, StepCheckKey, SwitchCheckKey
from splash_jax.scheduler import Request, Scheduler, Status
from tests.engine.conftest import TOLERANCE, add, drive, go, greedy, tokens
from tests.support import assert_all_free, max_logprob_difference

pytestmark = pytest.mark.timeout(120)

FIRST, SECOND, LATE = tokens(9, 1), tokens(5, 2), tokens(21, 3)
NEW = 14


class Broken(Exception):
    """What the tests inject."""


def once(
    patch: pytest.MonkeyPatch, place: Any, name: str, error: BaseException, when: Callable[..., bool] = lambda *a: True
) -> list[str]:
    """Let a function raise the first time that it is called with such arguments; says so in the list."""
    right, raised = getattr(place, name), []

    def broken(*args: Any, **named: Any) -> Any:
        if not raised and when(*args):
            raised.append(name)
            raise error
        return right(*args, **named)

    patch.setattr(place, name, broken)
    return raised


def of_late(at: int, what: Callable[[Any], str | None]) -> Callable[..., bool]:
    """Whether a call's argument of this number is of the request that is named "late"."""
    return lambda *args: what(args[at]) == "late"


def is_step(kind: type) -> Callable[..., bool]:
    return lambda self, key: isinstance(key, kind)


# What fails -> where, on which call, and whose fault it is: the late request's, everybody's in the step, or nobody's.
STAGES: dict[str, tuple[Any, str, Callable[..., bool], str]] = {
    "pressure": (Scheduler, "under_pressure", lambda *a: True, "all"),
    "schedule": (Scheduler, "schedule", lambda *a: True, "all"),
    "rows": (PagePool, "grow_all", lambda *a: True, "all"),
    "home": (Scheduler, "_lightest", lambda *a: True, "late"),
    "admission": (PagePool, "add", of_late(1, str), "late"),
    "pages": (PagePool, "grow", of_late(1, str), "late"),
    "work": (steps_module, "work_of", of_late(0, lambda chunk: chunk.request.name), "late"),
    "counts": (steps_module, "counts_of", of_late(0, lambda request: request.name), "late"),
    "reset program": (Programs, "get", is_step(ResetKey), "late"),
    "batch": (steps_module, "build_batch", lambda *a: True, "all"),
    "program": (Programs, "get", is_step(StepKey), "all"),
    "inputs": (execute_module, "to_devices", lambda *a: True, "all"),
    "record": (steps_module, "make_record", lambda *a: True, "all"),
}
PLAIN = list(STAGES)
STAGES["switch program"] = (Programs, "get", is_step(SwitchKey), "all")
SWITCHING = [name for name in STAGES if name != "home"]  # which the plan of a switch asks for, too


@pytest.fixture(scope="module")
def alone_outputs(shared: LLM) -> list[Any]:
    go(shared, "tp")
    return [shared.generate([prompt], greedy(NEW, logprobs=2))[0] for prompt in (FIRST, SECOND)]


class Running:
    """Two requests that run, and a third that the next step admits, counts penalties of and draws for."""

    def __init__(self, llm: LLM, layout: str = "tp") -> None:
        self.llm, self.layout = go(llm, layout), layout
        settings = greedy(NEW, logprobs=2)
        self.early = [llm.engine.add_request(f"early{i}", p, settings) for i, p in enumerate((FIRST, SECOND))]
        for _ in range(4):
            llm.engine.step()
        assert llm.engine._pending is not None and all(r.output_ids for r in self.early)
        self.late = llm.engine.add_request("late", LATE, greedy(NEW, presence_penalty=0.5))

    def step_in(self) -> None:
        """One step; what the step before it drew has been read afterwards, whether or not this one came to be."""
        read = [len(request.output_ids) for request in self.early]
        self.llm.engine.step()
        assert [len(request.output_ids) for request in self.early] == [n + 1 for n in read]
        self.check_pool()

    def check_pool(self) -> None:
        engine = self.llm.engine
        pools = [engine.pool] if engine._spreading is None else [engine._spreading.twin.src, engine._spreading.twin.dst]
        for pool in pools:
            pool.check(live=[request.name for request in engine.scheduler.running])

    def end(self, ended: list[Request], want: list[Any], what: str) -> None:
        """Everybody else goes on with the tokens of an undisturbed run, and nothing is left."""
        llm = self.llm
        for request in ended:
            assert (request.status, request.finish_reason) == (Status.FINISHED, "error")
            assert request.error and what in request.error and "The engine runs on" in request.error
        drive(llm)
        for request in (*self.early, self.late):
            assert llm.engine.take(request.name)[0] is request
            if request not in ended:
                assert (request.finish_reason, request.error) == ("length", None)
                assert len(request.output_ids) == NEW
        for request, output in zip(self.early, want, strict=True):
            drawn = list(output.outputs[0].token_ids)
            assert request.output_ids == drawn[: len(request.output_ids)]
        assert_all_free(llm)
        again = go(llm, self.layout).generate([FIRST, SECOND], greedy(NEW, logprobs=2))
        for mine, same in zip(again, want, strict=True):
            assert max_logprob_difference(mine, same) <= TOLERANCE


@pytest.mark.parametrize("stage", PLAIN)
def test_a_fault_before_a_plain_step(
    llm: LLM, alone_outputs: list[Any], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    it = Running(llm)
    place, name, when, whose = STAGES[stage]
    with monkeypatch.context() as patch:
        raised = once(patch, place, name, Broken(stage), when)
        it.step_in()
    assert raised
    ended = [r for r in (*it.early, it.late) if r.status is Status.FINISHED]
    assert ended == [it.late] if whose == "late" else ended[:2] == it.early
    it.end(ended, alone_outputs, f"Broken('{stage}')")


def switching() -> list[Any]:
    """Every stage inside a step, and blocking where that differs; the rest of blocking is slow."""
    slow = {stage for stage in SWITCHING if "program" not in stage and stage != "inputs"}
    return [
        pytest.param(stage, mode, marks=pytest.mark.slow if mode == "blocking" and stage in slow else ())
        for mode in ("splash", "blocking")
        for stage in SWITCHING
    ]


@pytest.mark.parametrize(("stage", "mode"), switching())
def test_a_fault_before_a_step_with_a_switch(
    llm: LLM, alone_outputs: list[Any], monkeypatch: pytest.MonkeyPatch, stage: str, mode: str
) -> None:
    """A request at fault ends and the switch is made in the next step; else the switch is refused and nobody ends."""
    it = Running(llm)
    place, name, when, whose = STAGES[stage]
    future = llm.engine.request_switch("cp", mode)
    with monkeypatch.context() as patch:
        raised = once(patch, place, name, Broken(stage), when)
        it.step_in()
    assert raised and llm.layout == "tp" and str(llm.engine.pool.layout) == "tp"
    if whose == "late":
        assert not future.done()
        it.end([it.late], alone_outputs, f"Broken('{stage}')")
        assert str(future.result(0).after.layout) == "cp"
    else:
        with pytest.raises(SwitchRefused, match=f"switch tp -> cp was not begun, its step .*Broken\\('{stage}'\\)"):
            future.result(0)
        it.end([], alone_outputs, "")


@pytest.mark.parametrize(
    ("stage", "error"), [*((stage, KeyboardInterrupt) for stage in SWITCHING), ("batch", SystemExit)]
)
def test_an_interrupt_before_the_dispatch_costs_nobody_anything(
    llm: LLM, alone_outputs: list[Any], monkeypatch: pytest.MonkeyPatch, stage: str, error: type[BaseException]
) -> None:
    """As a second Ctrl-C, which does not wait for the end of the step. The switch stays queued."""
    it = Running(llm)
    place, name, when, _ = STAGES[stage]
    future = llm.engine.request_switch("cp")
    with monkeypatch.context() as patch:
        once(patch, place, name, error(), when)
        with pytest.raises(error):
            llm.engine.step()
    it.check_pool()
    assert llm.layout == "tp" and not future.done()
    llm.engine.step()
    assert str(future.result(0).after.layout) == "cp"
    it.end([], alone_outputs, "")


def test_an_interrupt_while_a_switch_is_planned_leaves_it_queued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go(llm, "tp")
    future = llm.engine.request_switch("cp")
    with monkeypatch.context() as patch:
        once(patch, PagePool, "manifest", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
    drive(llm)
    assert str(future.result(0).after.layout) == "cp" == llm.layout


def test_an_abort_that_fails_ends_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [add(llm, tokens(4, i), greedy(6)) for i in range(3)]
    llm.engine.step()
    llm.engine.abort(requests[1].name)
    with monkeypatch.context() as patch:
        raised = once(patch, Scheduler, "finish", Broken("abort"))
        llm.engine.step()
    assert raised
    drive(llm)
    ends = [llm.engine.take(request.name)[0] for request in requests]
    assert [request.finish_reason for request in ends] == ["length", "error", "length"]
    assert ends[1].error and "Broken('abort')" in ends[1].error
    assert_all_free(llm)


def test_a_fault_in_a_preemption_ends_one_request(alone: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages run out, and the youngest request cannot give its own back."""
    engine = alone.engine
    whole = engine.pool
    monkeypatch.setattr(engine, "pool", PagePool(whole.layout, whole.kv, 20))
    requests = [add(alone, tokens(12, i), greedy(40)) for i in range(3)]
    with monkeypatch.context() as patch:
        raised = once(patch, PagePool, "release", Broken("release"))
        while not raised:
            engine.step()
    engine.pool.check(live=[request.name for request in engine.scheduler.running])
    drive(alone)
    ended = [request for request in requests if request.error]
    assert len(ended) == 1 and "Broken('release')" in str(ended[0].error)
    for request in requests:
        engine.take(request.name)
        assert request in ended or (len(request.output_ids) == 40 and request.finish_reason == "length")
    assert_all_free(alone)
    monkeypatch.setattr(engine, "pool", whole)
    for request in requests:
        want = alone.generate([request.prompt_ids], greedy(40))[0].outputs[0].token_ids
        assert tuple(request.output_ids) == want[: len(request.output_ids)]


@pytest.mark.parametrize("at", [0, 2])  # steps of the switch before: none has moved anything, or some have
@pytest.mark.parametrize(
    ("place", "name", "when", "whose"),
    [
        pytest.param(steps_module, "work_of", STAGES["work"][2], "late", id="work"),
        pytest.param(PagePool, "grow", STAGES["pages"][2], "late", id="pages"),
        pytest.param(steps_module, "build_batch", lambda *a: True, "all", id="batch"),
        pytest.param(steps_module, "plan_between", lambda *a: True, "all", id="plan"),
        pytest.param(spread_module, "put_batch", lambda *a: True, "all", id="inputs"),
        pytest.param(spread_module, "make_maps", lambda *a: True, "all", id="maps"),
        pytest.param(Programs, "get", is_step(BeginKey), "all", id="program"),
    ],
)
def test_a_fault_before_a_step_of_a_spread_switch(
    spreading: LLM, monkeypatch: pytest.MonkeyPatch, at: int, place: Any, name: str, when: Any, whose: str
) -> None:
    """Before anything has moved the switch is refused and nobody ends. Later the requests end, and it goes on."""
    want = [go(spreading, "dp").generate([p], greedy(NEW, logprobs=2))[0] for p in (FIRST, SECOND)]
    it, engine = Running(spreading, "dp"), spreading.engine
    engine.drop(it.late.name)
    future = engine.request_switch("tp", "spread")
    for _ in range(at):
        engine.step()
    it.late = engine.add_request("late", LATE, greedy(NEW, presence_penalty=0.5))
    with monkeypatch.context() as patch:
        raised = once(patch, place, name, Broken(name), when)
        it.step_in()
    assert raised and not (future.done() and at)
    about_all = [*it.early, it.late] if at else []
    ended = [it.late] if whose == "late" else about_all
    it.end(ended, want, f"Broken('{name}')")
    if whose == "all" and not at:
        with pytest.raises(SwitchRefused, match="switch dp -> tp was not begun, its step failed before: Broken"):
            future.result(0)
    else:
        assert str(future.result(0).after.layout) == "tp"


def test_an_interrupt_in_a_spread_switch_leaves_it_under_way(spreading: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = [go(spreading, "dp").generate([p], greedy(NEW, logprobs=2))[0] for p in (FIRST, SECOND)]
    it, engine = Running(spreading, "dp"), spreading.engine
    future = engine.request_switch("tp", "spread")
    for _ in range(3):
        with monkeypatch.context() as patch:
            once(patch, steps_module, "build_batch", KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        it.check_pool()
        engine.step()
    it.end([], want, "")
    assert str(future.result(0).after.layout) == "tp"


def test_a_program_that_is_missing_or_does_not_compile_ends_the_requests_of_its_step(
    llm: LLM, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    for it, words in ((llm, r"ProgramMissing.*no program was compiled for"), (alone, r"Broken\('no compiler'\)")):
        (want,) = it.generate([FIRST], greedy(4))
        with monkeypatch.context() as patch:
            patch.setattr(it.engine.programs, "_programs", {})
            once(patch, Programs, "lower", Broken("no compiler"))
            (output,) = it.generate([FIRST], greedy(4))
        assert output.error and re.search(words, output.error) and output.outputs[0].finish_reason == "error"
        with monkeypatch.context() as patch:
            patch.setattr(it.engine.programs, "_programs", {})
            once(patch, Programs, "lower", Broken("no compiler"))
            with pytest.raises(RequestError, match=words):
                it.logits(FIRST)
        (again,) = it.generate([FIRST], greedy(4))
        assert again.outputs == want.outputs
        assert_all_free(it)


def test_results_that_one_request_cannot_take_end_it_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (want,) = llm.generate([FIRST], greedy(6))
    with monkeypatch.context() as patch:
        raised = once(
            patch, Engine, "_take_token", Broken("odd"), lambda self, request, *a: len(request.prompt_ids) == 5
        )
        outputs = llm.generate([FIRST, SECOND], greedy(6))
    assert raised and outputs[0].outputs == want.outputs and outputs[0].error is None
    assert outputs[1].error == "its results could not be taken: Broken('odd')"
    assert outputs[1].outputs[0].finish_reason == "error"
    assert_all_free(llm)


def test_a_dispatch_asks_for_no_program_that_was_not_looked_up_before(
    llm: LLM, spreading: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that none can be missing, or fail to compile, once state is on its way."""
    before: set[Any] = set()
    called: list[Any] = []
    calls = 0
    right = Programs.get

    def get(self: Programs, key: Any) -> Any:
        program = right(self, key)
        if called:
            assert key in before, f"{key} was first asked for after {called[0]} had been dispatched."
        before.add(key)

        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if not isinstance(key, StepCheckKey | SwitchCheckKey):  # they read what was sent, and change nothing
                called.append(key)
            return program(*args)

        return call

    step = Engine.step

    def stepping(engine: Engine) -> None:
        before.clear()
        called.clear()
        step(engine)

    for it, switches in (
        (go(llm, "tp"), {3: "cp", 5: ("tp", "blocking"), 7: "dop", 9: "tp"}),
        (go(spreading, "dp"), {3: ("tp", "spread"), 10: "dp"}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Programs, "get", get)
            patch.setattr(Engine, "step", stepping)
            it.generate([FIRST, SECOND, LATE], greedy(14, presence_penalty=0.5), switches=switches)
            it.logits(FIRST, switches={0: it.layout})
        assert_all_free(it)
    assert calls > 100


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_in_a_preemption_costs_no_token(alone: LLM, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """Between giving pages back and leaving the running, and right after: it is queued, and begins from its start."""
    engine = alone.engine
    whole, leave, interrupted = engine.pool, Scheduler._leave, []

    def broken(self: Scheduler, request: Request) -> None:
        if after:
            leave(self, request)
        if not interrupted and request.status is Status.RUNNING and not request.finish_reason:
            interrupted.append(request)
            raise KeyboardInterrupt
        if not after:
            leave(self, request)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "pool", PagePool(whole.layout, whole.kv, 20))
        requests = [add(alone, tokens(12, i), greedy(40)) for i in range(3)]
        patch.setattr(Scheduler, "_leave", broken)
        with pytest.raises(KeyboardInterrupt):
            drive(alone)
        assert [request.preemptions for request in interrupted] == [1]
        drive(alone)
        assert_all_free(alone)
    for request in requests:
        engine.take(request.name)
        want = alone.generate([request.prompt_ids], greedy(40))[0].outputs[0].token_ids
        assert tuple(request.output_ids) == want and request.finish_reason == "length"


def test_a_callback_that_interrupts_leaves_no_answered_switch_behind(llm: LLM) -> None:
    def interrupt(future: Any) -> None:
        raise KeyboardInterrupt

    go(llm, "tp").engine.request_switch("tp").add_done_callback(interrupt)
    late = add(llm, tokens(5, 1), greedy(4))
    with pytest.raises(KeyboardInterrupt):
        drive(llm)
    drive(llm)
    assert late.finish_reason == "length" and not late.error
    llm.engine.take(late.name)
