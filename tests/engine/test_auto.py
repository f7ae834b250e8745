"""layout="auto": the policy follows the load, and no output depends on it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import splash_jax.engine.steps as steps_module
from splash_jax import LLM
from splash_jax.engine.pilot import Pilot, profile_of
from splash_jax.errors import ConfigError, LayoutError, PolicyError
from splash_jax.scheduler import PolicyConfig, replay
from tests.engine.conftest import TOLERANCE, add, drive, go, greedy, teacher_forced, tokens
from tests.support import assert_all_free, make_llm

POLICY = PolicyConfig(dwell_steps=0, max_switches=1000)
# Messages cost nothing, histories much: owners lead as soon as there are several requests, and a lone one leads nobody.
PROFILE = """
name = "made up"
hbm_bytes = 1e9
hbm_bytes_per_s = 1e9
bf16_flops_per_s = 1e12
interconnect_bytes_per_s = 1e12
message_latency_s = 1e-9
kv_bytes_per_s = 1e6
[provenance]
hbm_bytes = "made up"
hbm_bytes_per_s = "made up"
bf16_flops_per_s = "made up"
interconnect_bytes_per_s = "made up"
message_latency_s = "made up"
kv_bytes_per_s = "made up"
"""


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hardware") / "made_up.toml"
    path.write_text(PROFILE)
    return path


@pytest.fixture(scope="module")
def log(profile: Path) -> Path:
    return profile.parent / "log.jsonl"


@pytest.fixture
def auto(llm: LLM, profile: Path, log: Path) -> Iterator[LLM]:
    """The shared engine, all of whose programs are there, from tp on with a policy at its wheel for one test."""
    go(llm, "tp")
    engine = llm.engine
    settings = replace(engine.config, policy=POLICY, hardware=profile, decision_log=log)
    engine.pilot = Pilot(replace(engine.blueprint, config=settings), profile_of(settings))
    yield llm
    engine.pilot = None


@pytest.mark.slow
def test_an_engine_is_built_with_a_policy(small: Path, alone: LLM, profile: Path) -> None:
    llm = make_llm(small, layout="auto", layouts=("tp", "dop"), hardware=profile, policy=POLICY)
    assert llm.layout == "tp"
    [ours] = llm.generate([tokens(20, 1)], greedy(12))
    [theirs] = alone.generate([tokens(20, 1)], greedy(12))
    assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
    assert llm.engine.pilot is not None and len(llm.engine.pilot.decisions) >= 12
    llm.set_policy(pin="dop")
    drive_some(llm)
    assert llm.layout == "dop"


def test_the_policy_leads_to_owners_and_no_token_depends_on_it(auto: LLM, alone: LLM) -> None:
    auto.set_policy(allowed=("tp", "dp", "dop"))
    since = len(auto.records)
    requests = [add(auto, tokens(20 + 9 * i, i), greedy(12 + i, logprobs=0)) for i in range(6)]
    drive(auto)
    records = auto.records[since:]
    assert any(record.switch is not None for record in records)
    assert {record.layout for record in records if record.rows > 3} <= {"dp", "dop"}
    for request in requests:
        auto.engine.take(request.name)
        values = teacher_forced(alone, request.prompt_ids, request.output_ids)
        assert max(abs(values - [p for p, _ in request.logprobs])) <= TOLERANCE
    assert_all_free(auto)


def test_every_decision_is_logged_with_its_reasons_and_replays(auto: LLM, log: Path) -> None:
    since = len(auto.records)
    drive_some(auto)
    lines = log.read_text().splitlines()
    assert len(lines) >= len(auto.records) - since > 0
    assert len(list(replay(lines))) == len(lines)
    steps = [json.loads(line)["step"] for line in lines]
    assert steps[-1] == auto.records[-1].step or steps[-1] == auto.records[-1].step + 1
    first = json.loads(lines[0])
    assert set(first["layouts"]) == set(auto.engine.blueprint.layouts)
    assert all(told["fits"] in (True, False) and told["why"] for told in first["layouts"].values())


def drive_some(llm: LLM) -> None:
    requests = [add(llm, tokens(9 + i, i), greedy(4)) for i in range(5)]
    drive(llm)
    for request in requests:
        llm.engine.take(request.name)


def test_a_pin_and_an_allowed_set_hold_from_the_next_step_on(auto: LLM) -> None:
    auto.set_policy(pin="tp")
    since = len(auto.records)
    drive_some(auto)
    assert {record.layout for record in auto.records[since:]} == {"tp"}
    auto.set_policy(pin=None, allowed=("dop",))
    since = len(auto.records)
    drive_some(auto)
    assert {record.layout for record in auto.records[since:]} == {"dop"}
    auto.set_policy(allowed=None)


def test_a_short_longest_step_makes_prompts_come_in_smaller_chunks(auto: LLM) -> None:
    rows = {}
    for limit in (None, 1e-9):
        auto.set_policy(pin="tp", step_seconds=limit)
        since = len(auto.records)
        request = add(auto, tokens(60, 3), greedy(2))
        drive(auto)
        auto.engine.take(request.name)
        rows[limit] = [record.rows for record in auto.records[since:] if record.rows > 1]
    tile = auto.engine.config.tile_of("xla")
    assert rows[None] == [60]
    assert sum(rows[1e-9]) == 60 and max(rows[1e-9]) == tile


@pytest.mark.parametrize("name", ["steer", "mode", "expect", "finished"])
def test_a_policy_that_fails_ends_nobody(auto: LLM, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    auto.set_policy(pin="dop")
    deep = {"expect": ("_costs", "step_seconds"), "finished": ("observer", "lifetimes")}

    def broken(*args: object) -> None:
        raise RuntimeError("no idea")

    pilot = auto.engine.pilot
    assert pilot is not None
    if name in deep:
        holder, attribute = deep[name]
        monkeypatch.setattr(getattr(pilot, holder), attribute, broken)
    else:
        monkeypatch.setattr(pilot, name, broken)
    requests = [add(auto, tokens(9 + i, i), greedy(4)) for i in range(5)]
    drive(auto)
    monkeypatch.undo()
    for request in requests:
        auto.engine.take(request.name)
        assert (request.finish_reason, request.error, len(request.output_ids)) == ("length", None, 4)
    assert auto.layout == ("dop" if name == "finished" else "tp")
    assert_all_free(auto)


def test_a_switch_that_is_asked_for_before_every_step_and_always_fails_holds_up_nobody(
    auto: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that it was refused in comes without it."""
    auto.set_policy(pin="dop")
    right, failed = steps_module.build_batch, []

    def broken(shapes: Any, layout: Any, *rest: Any) -> Any:
        if str(layout) == "dop":
            failed.append(layout)
            raise RuntimeError("no batch of dop")
        return right(shapes, layout, *rest)

    monkeypatch.setattr(steps_module, "build_batch", broken)
    since = len(auto.records)
    requests = [add(auto, tokens(9 + i, i), greedy(4)) for i in range(3)]
    drive(auto)
    for request in requests:
        assert auto.engine.take(request.name)[0].finish_reason == "length" and request.error is None
    assert len(failed) >= len(auto.records) - since - 1 > 2 and auto.layout == "tp"
    assert_all_free(auto)


def test_a_switch_is_made_in_the_only_mode_that_was_built(llm: LLM, profile: Path) -> None:
    """A program of another mode would be missing in an engine that compiles ahead."""
    settings = replace(
        llm.engine.config, policy=replace(POLICY, pin="dop"), hardware=profile, switch_modes=("blocking",)
    )
    go(llm, "tp").engine.pilot = Pilot(replace(llm.engine.blueprint, config=settings), profile_of(settings))
    since = len(llm.records)
    try:
        drive_some(llm)
    finally:
        llm.engine.pilot = None
    assert llm.layout == "dop"
    assert [record.switch_mode for record in llm.records[since:] if record.switch] == ["blocking"]


def test_a_policy_that_fails_ends_no_request(auto: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go(auto, "dp")
    with monkeypatch.context() as patch:
        patch.setattr("splash_jax.engine.pilot.decide", lambda snapshot: 1 / 0)
        since = len(auto.records)
        drive_some(auto)
    assert {record.layout for record in auto.records[since:]} == {"dp"}
    assert_all_free(auto)


def test_what_steps_take_corrects_the_estimates(auto: LLM) -> None:
    """The made-up profile is far off: it is reported, and no longer obeyed."""
    drive_some(auto)
    seen = auto.engine.pilot.observer.residuals
    assert seen.own and all(np.isfinite(one.mean) for one in seen.own.values())
    before = len(auto.engine.pilot.decisions)
    drive_some(auto)
    assert len(auto.engine.pilot.decisions) > before


def test_an_engine_without_a_policy_says_so(llm: LLM) -> None:
    with pytest.raises(LayoutError, match=r"stays in \w+ until it is switched; build it with layout='auto'"):
        llm.set_policy(pin="tp")


def test_what_a_policy_cannot_be_told(auto: LLM, small: Path) -> None:
    with pytest.raises(LayoutError, match=r"unknown layout .xp.; choose one of tp, dp"):
        auto.set_policy(pin="xp")
    with pytest.raises(PolicyError, match="a policy has no speed; it has rule, pin"):
        auto.set_policy(speed=3)
    with pytest.raises(ConfigError, match="no hardware config is named 'h300'; there are: "):
        make_llm(small, layout="auto", hardware="h300")
    with pytest.raises(ConfigError, match="policy must be a PolicyConfig, got 'regret'"):
        make_llm(small, layout="auto", policy="regret")
    with pytest.raises(LayoutError, match="the policy's 'rep' is not among the allowed layouts tp, dp"):
        make_llm(small, layout="auto", layouts=("tp", "dp"), policy=PolicyConfig(pin="rep"))
