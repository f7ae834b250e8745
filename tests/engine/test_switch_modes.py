"""Splash and its two references come to the same: blocking moves all state before the step, target-ready earlier."""

import pytest

from splash_jax import LLM
from splash_jax.engine import StepRecord
from splash_jax.errors import ConfigError, LayoutError
from splash_jax.kv import PagePool
from splash_jax.runtime import SwitchKey, SwitchMode, move_all, prepare_switch
from tests.engine.conftest import TOLERANCE, add, drive, go, greedy, mixed_prompts, teacher_forced
from tests.support import DIRECTIONS, EACH_DIRECTION, assert_all_free, make_llm

PROMPTS = mixed_prompts(54)  # of which no step's two best tokens are close
NEW = 10
AT = 4  # the step that switches: prompts are still coming in

Told = list[tuple[list[int], list[float]]]  # of each request its tokens and their log-probabilities


def serve(llm: LLM, src: str, dst: str | None, mode: str) -> tuple[Told, list[StepRecord]]:
    """Six greedy requests, with a switch before one of their steps, made in one of three ways or not at all."""
    go(llm, src)
    first = len(llm.records)
    requests = [add(llm, prompt, greedy(NEW, logprobs=0)) for prompt in PROMPTS]

    def each(step: int) -> None:
        if step == AT and dst is not None:
            if mode == "ready":
                make_ready(llm, dst)
            else:
                llm.engine.request_switch(dst, mode)

    drive(llm, each)
    assert_all_free(llm)
    for request in requests:
        llm.engine.take(request.name)
    return [(r.output_ids, [p for p, _ in r.logprobs]) for r in requests], llm.records[first:]


def make_ready(llm: LLM, dst: str) -> None:
    """Move everything to a layout between two steps."""
    engine = llm.engine
    plan = engine.plan(engine.allowed_layout(dst))
    route = engine.blueprint.route(plan.before.layout, plan.after.layout)
    move_all(engine.programs, engine.state, prepare_switch(engine.programs, plan, route))
    engine.pool = PagePool.adopt(plan.after)


@pytest.fixture(scope="module")
def fixed(shared: LLM, layouts: tuple[str, ...]) -> dict[str, Told]:
    return {layout: serve(shared, layout, None, "splash")[0] for layout in layouts}


@pytest.mark.parametrize(("src", "dst"), EACH_DIRECTION)
def test_all_three_give_the_same(llm: LLM, fixed: dict[str, Told], src: str, dst: str) -> None:
    for mode in ("splash", "blocking", "ready"):
        told, records = serve(llm, src, dst, mode)
        assert [r.layout for r in records[AT - 1 : AT + 1]] == [src, dst]
        assert records[AT].switch_mode == (None if mode == "ready" else mode)
        for (ids, logprobs), (same_ids, same) in zip(told, fixed[src], strict=True):
            assert ids == same_ids
            assert max(abs(a - b) for a, b in zip(logprobs, same, strict=True)) <= TOLERANCE


@pytest.mark.parametrize(
    ("src", "dst"),
    [pytest.param(*d, marks=() if d in {("cp", "tp"), ("tp", "dp")} else pytest.mark.slow) for d in DIRECTIONS],
)
def test_logprobs_across_a_blocking_switch_are_those_of_one_device(llm: LLM, alone: LLM, src: str, dst: str) -> None:
    told, _ = serve(llm, src, dst, "blocking")
    for prompt, (ids, logprobs) in zip(PROMPTS[::5], told[::5], strict=True):
        assert max(abs(teacher_forced(alone, prompt, ids) - logprobs)) <= TOLERANCE


def test_a_blocking_switch_may_be_asked_for_by_name(llm: LLM) -> None:
    go(llm, "tp")
    plan = llm.switch("dp", mode="blocking")
    assert str(plan.after.layout) == llm.layout == "dp"
    assert (llm.records[-1].switch, llm.records[-1].switch_mode) == (plan, "blocking")


def test_only_allowed_modes_are_compiled_and_served(llm: LLM, small) -> None:
    with pytest.raises(LayoutError, match="switch mode 'slow' is not among the allowed splash, blocking"):
        llm.switch("dp", mode="slow")
    with pytest.raises(ConfigError, match=r"switch_modes must be some of splash, blocking, spread, got \('slow',\)"):
        make_llm(small, switch_modes=("slow",))
    blocking = make_llm(small, num_devices=2, layouts=("tp", "dp"), switch_modes=("blocking",))
    with pytest.raises(LayoutError, match="switch mode 'splash' is not among the allowed blocking"):
        blocking.switch("dp")
    mine, usual = ({k for k in x.engine.blueprint.keys() if isinstance(k, SwitchKey)} for x in (blocking, llm))  # noqa: SIM118
    assert mine and all(key.kind is None for key in mine)
    assert any(key.kind for key in usual)
    assert set(llm.engine.config.switch_modes) == {SwitchMode.SPLASH, SwitchMode.BLOCKING}
