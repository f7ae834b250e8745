"""The policy at the wheel, without an engine: what it is told, what it asks for, and what it survives."""

import json
from pathlib import Path
from typing import Any

import pytest

from splash_jax.cost import Hardware, load_hardware
from splash_jax.engine.build import Blueprint, draw_up
from splash_jax.engine.config import EngineConfig
from splash_jax.engine.pilot import Expected, Pilot, log_path
from splash_jax.errors import ConfigError
from splash_jax.kv import PagePool
from splash_jax.scheduler import PolicyConfig, Request, Run, SamplingParams, Scheduler, Snapshot, Switch
from tests.support import make_llm

FACTORED = {"node": 2, "chip": 2}


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return load_hardware("h200")


def blueprint(model: Path, **settings: Any) -> Blueprint:
    defaults: dict[str, Any] = {
        "num_devices": 4, "layout": "auto", "layouts": ("tp", "dp", "dop"), "dtype": "float32", "max_num_seqs": 8,
        "max_model_len": 256, "block_size": 4, "max_num_batched_tokens": 64,
    }  # fmt: skip
    return draw_up(EngineConfig(model=model, **(defaults | settings)))


class Seat:
    """A pilot with a scheduler and a pool, as an engine has them, in some layout."""

    def __init__(self, plan: Blueprint, hardware: Hardware, layout: str | None = None) -> None:
        self.pilot = Pilot(plan, hardware)
        here = plan.config.layout_of(layout or plan.config.first_layout)
        self.pool = PagePool(here, plan.shapes.kv, plan.pages[here])
        self.scheduler = Scheduler(plan.config.max_num_seqs, plan.buckets.__getitem__)

    def add(self, prompt: int = 20, new: int = 8, name: str = "0") -> Request:
        request = Request(name=name, prompt_ids=[5] * prompt, params=SamplingParams(), seed=0, max_total=prompt + new)
        self.scheduler.add(request)
        return request

    def steer(self, step: int = 0) -> Any:
        return self.pilot.steer(self.scheduler, self.pool, step)


@pytest.mark.parametrize("late", [False, True])
def test_a_layout_may_be_named_by_its_role_on_a_mesh_of_two_axes(small: Path, hardware: Hardware, late: bool) -> None:
    told = PolicyConfig(pin="dp", allowed=("tp", "dp"))
    seat = Seat(blueprint(small, mesh=FACTORED, **({} if late else {"policy": told})), hardware)
    if late:
        seat.pilot.policy = told
    seat.add()
    decision = seat.steer()
    assert isinstance(decision.action, Switch) and decision.reason == "pinned"
    assert decision.action.layout == "node=dp,chip=dp"
    seat.pilot.policy = PolicyConfig(allowed=("tp", "dp"))
    assert seat.steer().reason != "nothing else fits"
    assert seat.pilot.policy.allowed == ("tp", "dp")  # what is changed at run time starts from what was said


@pytest.mark.parametrize(
    ("modes", "mode"),
    [
        (("splash", "blocking"), "splash"),
        (("blocking",), "blocking"),
        (("spread",), "spread"),
        (("spread", "blocking"), None),
    ],
)
def test_a_switch_is_made_in_a_way_that_the_engine_is_built_for(
    small: Path, hardware: Hardware, modes: tuple[str, ...], mode: str | None
) -> None:
    for rule in ({"pin": "dop"}, {"rule": "margin", "margin": 0.0, "allowed": ("dp", "dop")}):
        seat = Seat(blueprint(small, switch_modes=modes, policy=PolicyConfig(**rule)), hardware)
        seat.add()
        action = seat.steer().action
        assert isinstance(action, Switch)
        assert str(seat.pilot.mode(action)) in ((mode,) if mode else modes)
        snapshot = seat.pilot.decisions[-1][0]
        for quote in snapshot.quotes:
            if quote.layout != "tp":
                assert (quote.there is None) == (modes == ("spread",))
                assert (quote.there_spread is None) == ("spread" not in modes)


def test_what_is_quoted_is_the_switch_that_the_engine_makes(small: Path, hardware: Hardware) -> None:
    def quoted(**settings: Any) -> Any:
        seat = Seat(blueprint(small, **settings), hardware)
        seat.add(200)
        seat.steer()
        return {quote.layout: quote for quote in seat.pilot.decisions[-1][0].quotes}["dp"]

    assert quoted(switch_modes=("blocking",)).there > quoted(switch_modes=("splash",)).there
    for layers, steps in ((1, 4), (2, 3), (3, 2)):  # of 3 layers, and a step that completes the switch
        assert quoted(switch_modes=("splash", "spread"), spread_layers=layers).spread_steps == steps


@pytest.mark.parametrize("late", [False, True])
def test_directions_that_were_not_built_are_quoted_as_refused(small: Path, hardware: Hardware, late: bool) -> None:
    plan = blueprint(small, directions=(("tp", "dp"), ("dp", "dop")))
    seat = Seat(plan, hardware, "dp" if late else "tp")
    seat.pilot.policy = PolicyConfig(pin="tp" if late else "dop")
    seat.add()
    assert seat.steer().reason == "pin refused"
    quotes = {quote.layout: quote.refused for quote in seat.pilot.decisions[-1][0].quotes}
    if late:
        assert quotes == {"tp": "no switch dp -> tp is among the engine's directions", "dp": "", "dop": ""}
    else:
        assert quotes == {"tp": "", "dp": "", "dop": "no switch tp -> dop is among the engine's directions"}


def test_only_requests_that_draw_tokens_say_how_long_requests_get(small: Path, hardware: Hardware) -> None:
    seat = Seat(blueprint(small), hardware)
    scored, drawn = seat.add(name="0"), seat.add(name="1")
    scored.score, scored.finish_reason, drawn.finish_reason = True, "stop", "stop"
    drawn.output_ids = [5] * 40
    for _ in range(50):
        seat.pilot.finished(scored)
    assert seat.pilot.observer.lifetimes.ended.sum() == 0
    seat.pilot.finished(drawn)
    assert seat.pilot.observer.lifetimes.ended.sum() == 1


def test_snapshots_have_the_engines_number_of_the_step(small: Path, hardware: Hardware) -> None:
    seat = Seat(blueprint(small), hardware)
    seat.add()
    for step in (7, 8, 40):
        seat.steer(step)
    assert [snapshot.step for snapshot, _ in seat.pilot.decisions] == [7, 8, 40]


def test_a_log_that_cannot_be_written_is_refused_by_its_name(small: Path, tmp_path: Path) -> None:
    for path, why in ((tmp_path / "nowhere" / "log", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"decision_log '{path}' cannot be written: {why}.*Name a file"):
            log_path(path)
    assert log_path(str(tmp_path / "log")) == tmp_path / "log"


def test_a_log_stays_where_it_was_begun(
    small: Path, hardware: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    seat = Seat(blueprint(small, decision_log="log"), hardware)
    seat.add()
    seat.steer(0)
    monkeypatch.chdir(tmp_path / "elsewhere")
    seat.steer(1)
    assert [json.loads(line)["step"] for line in (tmp_path / "log").read_text().splitlines()] == [0, 1]
    assert list((tmp_path / "elsewhere").iterdir()) == []
    monkeypatch.setenv("HOME", str(tmp_path))
    assert log_path("~/log") == tmp_path / "log"


def test_an_engine_with_a_bad_log_is_refused_before_it_is_built(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splash_jax.engine.engine.build", lambda *_: pytest.fail("building takes long"))
    settings = {"layout": "auto", "hardware": "h200", "decision_log": tmp_path / "nowhere" / "log"}
    with pytest.raises(ConfigError, match="cannot be written"):
        make_llm(small, **settings)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_a_full_disk_ends_the_log_and_nothing_else(
    small: Path, hardware: Hardware, caplog: pytest.LogCaptureFixture
) -> None:
    seat = Seat(blueprint(small, decision_log=Path("/dev/full")), hardware)
    seat.add()
    assert [seat.steer(step).reason for step in range(3)] == ["stays"] * 3
    [told] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == "decisions are no longer written to /dev/full: No space left on device."


def test_a_policy_that_fails_stays_and_says_so_once(
    small: Path, hardware: Hardware, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat = Seat(blueprint(small, policy=PolicyConfig(pin="dop")), hardware)
    seat.add()

    def fails(snapshot: Snapshot) -> None:
        raise ZeroDivisionError(f"at step {snapshot.step}")

    with monkeypatch.context() as patch:
        patch.setattr("splash_jax.engine.pilot.decide", fails)
        decisions = [seat.steer(step) for step in range(3)]
    assert {(d.action, d.reason) for d in decisions} == {(Run(0), "policy failed")}
    seat.pilot.observe(Expected("tp", "decode", 0.0), 1.0)  # a prediction that nothing can be compared with
    [told] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == "the policy failed, and the engine stays in its layout while it does: ZeroDivisionError('at step 0')"
    assert isinstance(seat.steer(3).action, Switch)  # nothing is lost
