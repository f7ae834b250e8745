"""An exception anywhere in a switch: the engine runs on with nothing lost, or fails clearly and ends every request."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import splash_jax.engine.engine as engine_module
import splash_jax.runtime.switch as switch_module
from splash_jax import LLM, RequestOutput
from splash_jax.engine.build import load_state, open_checkpoint
from splash_jax.engine.engine import MOST_FUTILE
from splash_jax.errors import EngineFailed, SwitchRefused
from splash_jax.kv import PagePool
from splash_jax.runtime import Programs, SwitchKey
from splash_jax.scheduler import Scheduler, Status
from tests.engine.conftest import add, go, greedy, mixed_prompts
from tests.support import DIRECTIONS, assert_all_free

pytestmark = pytest.mark.timeout(120)  # a hang is one of the failures

PROMPTS = mixed_prompts(54)
AT = 4  # the step that switches
LAYERS = 3
SOME = [("tp", "cp"), ("cp", "tp"), ("dp", "cp")]  # gathered weights, gathered history, histories exchanged
WHENS = ("before", "during", "after")


class Broken(Exception):
    """What the tests inject."""


@dataclass
class Faulty:
    """Programs of which one layer's transfer fails once dispatched: before it runs, after, or the next call raising.

    All programs of a step are looked up before any of them is called, so what fails here is a call.
    """

    programs: Programs
    layer: int
    when: str
    seen: int = 0  # transfers so far
    armed: bool = field(default=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.programs, name)

    def get(self, key: Any) -> Any:
        program = self.programs.get(key)

        def call(*args: Any) -> Any:
            if not self.armed:
                return program(*args)
            if self.when == "after" and self.seen == self.layer + 1:
                raise Broken(f"after the transfer of layer {self.layer}")
            if not isinstance(key, SwitchKey) or key.more:
                return program(*args)
            self.seen += 1
            if self.seen != self.layer + 1 or self.when in ("after", "never"):
                return program(*args)
            if self.when == "during":
                program(*args)  # what it donates is gone
            raise Broken(f"{self.when} the transfer of layer {self.layer}")

        return call


@pytest.fixture
def twin(shared: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, str], LLM]]:
    """Fresh engines on the compiled programs of the shared one, one layer's transfer faulty; they may be broken."""

    def make(layer: int, when: str) -> LLM:
        it = shared.engine

        def build(config: Any, progress: Any, model: Any) -> Any:
            state = load_state(it.blueprint, it.programs.mesh, open_checkpoint(it.blueprint), None)
            return it.blueprint, Faulty(it.programs, layer, when, armed=False), state

        monkeypatch.setattr(engine_module, "build", build)
        config = it.config
        settings = {name: getattr(config, name) for name in config.__slots__}
        return LLM(settings.pop("model"), **settings)

    yield make


def arm(llm: LLM) -> None:
    llm.engine.programs.armed = True  # type: ignore[attr-defined]


def assert_failed_clearly(llm: LLM) -> None:
    """All pages free, nothing waits for an answer, and whoever asks for more is told."""
    assert_all_free(llm)
    engine = llm.engine
    assert not engine.busy
    for ask in (
        engine.step,
        lambda: add(llm, [5]),
        lambda: engine.request_switch("tp"),
        lambda: llm.switch("tp"),
        lambda: llm.generate([[5]], greedy(1)),
    ):
        with pytest.raises(EngineFailed, match=r"a step failed \(Broken\(.*layer \d.*\); build a new engine"):
            ask()
    assert_all_free(llm)


def cases() -> list[Any]:
    """Every layer and moment; by default of one direction in each mode, all else slow."""
    found = []
    for mode in ("splash", "blocking"):
        for i, (src, dst) in enumerate(SOME):
            for layer in range(LAYERS):
                for when in WHENS:
                    quick = (i == 0) if mode == "splash" else (i == 1 and when == "during")
                    marks = () if quick else pytest.mark.slow
                    name = f"{src}-{dst}-{mode}-{when}-{layer}"
                    found.append(pytest.param(src, dst, mode, layer, when, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("src", "dst", "mode", "layer", "when"), cases())
def test_a_fault_inside_a_switch_ends_every_request_with_an_error(
    twin: Callable[[int, str], LLM], src: str, dst: str, mode: str, layer: int, when: str
) -> None:
    llm = go(twin(layer, when), src)
    arm(llm)
    unattended = add(llm, PROMPTS[3], greedy(30))  # nobody drives it but the others
    waiting = []

    def on_step(record: Any) -> None:
        if len(llm.records) >= AT and not waiting:
            waiting.append(llm.engine.request_switch(dst, mode))
            waiting.append(llm.engine.request_switch(src, mode))

    with pytest.raises(EngineFailed, match=f"{when} the transfer of layer {layer}") as failure:
        llm.generate(PROMPTS, greedy(20), on_step=on_step)
    assert isinstance(failure.value.__cause__, Broken)
    assert (unattended.status, unattended.finish_reason) == (Status.FINISHED, "error")
    assert unattended.error and "layer" in unattended.error
    for future in waiting:
        with pytest.raises(EngineFailed, match="before this switch was made"):
            future.result(0)
    assert llm.engine.take(unattended.name)[0] is unattended
    assert_failed_clearly(llm)


@pytest.mark.parametrize("when", WHENS)
def test_a_fault_in_a_switch_that_another_thread_asks_for(twin: Callable[[int, str], LLM], when: str) -> None:
    llm = go(twin(1, when), "tp")
    arm(llm)
    started, told = threading.Event(), {}

    def asking(name: str, ask: Callable[[], Any]) -> None:
        try:
            told[name] = ask()
        except BaseException as error:
            told[name] = error

    def generate() -> Any:
        return llm.generate(PROMPTS, greedy(200), on_step=lambda record: started.set())

    def switch() -> Any:
        started.wait(60)
        return llm.switch("cp")

    asks = {"one": generate, "other": generate, "switch": switch}
    threads = [threading.Thread(target=asking, args=item, daemon=True) for item in asks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "somebody still waits for an answer."
    assert {name: type(error) for name, error in told.items()} == dict.fromkeys(asks, EngineFailed), told
    assert_failed_clearly(llm)


def test_a_fault_while_results_are_read_ends_every_request(
    twin: Callable[[int, str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device whose program fails after it was dispatched."""
    llm = go(twin(0, "never"), "dp")
    read = type(llm.engine)._read

    def failing(engine: Any, pending: Any) -> None:
        if pending.record.switch is not None:
            raise Broken("reading what layer 0 to 2 gave")
        read(engine, pending)

    monkeypatch.setattr(type(llm.engine), "_read", failing)
    with pytest.raises(EngineFailed, match="reading what"):
        llm.generate(PROMPTS, greedy(20), switches={AT: "dop"})
    assert_failed_clearly(llm)


def test_a_fault_while_results_are_read_under_pressure_ends_every_request(
    twin: Callable[[int, str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = go(twin(0, "never"), "tp")

    def failing(engine: Any, pending: Any) -> None:
        raise Broken("reading layer 0 before pages are given back")

    add(llm, PROMPTS[3], greedy(30))
    llm.engine.step()
    monkeypatch.setattr(Scheduler, "under_pressure", lambda *args: True)
    monkeypatch.setattr(type(llm.engine), "_read", failing)
    with pytest.raises(EngineFailed, match="reading layer 0 before"):
        llm.engine.step()
    assert_failed_clearly(llm)


def test_a_fault_before_a_dispatch_that_is_nobodys_ends_the_engine(
    twin: Callable[[int, str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no request to end and no switch to refuse: the third in a row, as every later step would fail alike."""
    llm = go(twin(0, "never"), "tp")
    request = add(llm, PROMPTS[3], greedy(30))
    llm.engine.step()
    llm.engine.abort(request.name)

    def failing(*args: Any) -> bool:
        raise Broken("layer 0 of nobody")

    monkeypatch.setattr(Scheduler, "schedule", failing)
    for _ in range(MOST_FUTILE - 1):
        llm.engine.step()
    with pytest.raises(EngineFailed, match="layer 0 of nobody"):
        llm.engine.step()
    assert_failed_clearly(llm)


def test_a_fault_in_the_step_that_only_reads_costs_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tokens are read, so the request is done; nobody is left to end."""
    it = go(llm, "tp")
    want = it.generate([PROMPTS[3]], greedy(3))[0].outputs[0].token_ids
    schedule, calls = Scheduler.schedule, []

    def broken(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 4:
            raise Broken("nobody's")
        return schedule(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "schedule", broken)
        assert it.generate([PROMPTS[3]], greedy(3))[0].outputs[0].token_ids == want
    assert len(calls) >= 4
    assert it.generate([PROMPTS[3]], greedy(3))[0].outputs[0].token_ids == want


EARLY = {  # what fails, before any state is touched
    "plan": (engine_module, "plan_switch"),
    "maps": (switch_module, "make_maps"),
    "maps to devices": (switch_module, "to_devices"),
    "pages": (PagePool, "adopt"),
}


STILL = {("tp", "dop"), ("tp", "dcp"), ("rep", "dp"), ("rep", "cp")}  # nothing moves, so there are no maps


def some_early() -> list[Any]:
    quick = {("tp", "cp"), ("dp", "tp")}
    return [
        pytest.param(src, dst, what, id=f"{src}-{dst}-{what}", marks=() if (src, dst) in quick else pytest.mark.slow)
        for src, dst in DIRECTIONS
        for what in EARLY
        if (src, dst) not in STILL or what in ("plan", "pages")
    ]


@pytest.fixture(scope="module")
def fixed(shared: LLM, layouts: tuple[str, ...]) -> dict[str, list[RequestOutput]]:
    return {layout: go(shared, layout).generate(PROMPTS, greedy(12, logprobs=2)) for layout in layouts}


@pytest.mark.parametrize(("src", "dst", "what"), some_early())
def test_a_fault_before_anything_moves_leaves_the_engine_as_it_was(
    llm: LLM, fixed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, src: str, dst: str, what: str
) -> None:
    go(llm, src)
    place, name = EARLY[what]
    right = getattr(place, name)
    refused = []

    def broken(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(place, name, right)  # once
        refused.append(what)
        raise Broken(what)

    monkeypatch.setattr(place, name, broken)
    first = len(llm.records)
    with pytest.raises(SwitchRefused, match=f"switch {src} -> {dst} could not be prepared: Broken") as refusal:
        llm.generate(PROMPTS, greedy(12, logprobs=2), switches={AT: dst})
    assert refused == [what] and isinstance(refusal.value.__cause__, Broken)
    outputs = refusal.value.outputs
    assert outputs is not None and {r.layout for r in llm.records[first:]} == {src}
    for mine, same in zip(outputs, fixed[src], strict=True):  # bit by bit: the same programs on the same batches
        assert mine.outputs == same.outputs and mine.error is None
    assert_all_free(llm)
    llm.generate(PROMPTS, greedy(12), switches={AT: dst})
    assert llm.layout == dst
