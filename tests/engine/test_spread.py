"""A switch spread over several steps changes no output, wherever requests come, end and are given up meanwhile."""

from itertools import permutations

import pytest

from splash_jax import LLM
from splash_jax.engine import StepRecord
from splash_jax.errors import LayoutError
from tests.engine.conftest import GAP, TOLERANCE, add, drive, go, greedy, mixed_prompts, smallest_gap
from tests.engine.test_random_walk import judge, walk
from tests.support import assert_all_free, max_logprob_difference

PROMPTS = mixed_prompts(54)
FEW = [("dp", "tp")]
LAYOUTS = ("tp", "dp", "cp")


def directions() -> list[object]:
    return [pytest.param(*pair, marks=() if pair in FEW else pytest.mark.slow) for pair in permutations(LAYOUTS, 2)]


@pytest.mark.parametrize(("src", "dst"), directions())
def test_a_spread_switch_changes_nothing(spreading: LLM, src: str, dst: str) -> None:
    llm = go(spreading, src)
    fixed = llm.generate(PROMPTS, greedy(logprobs=2))
    assert smallest_gap(fixed) > GAP
    records: list[StepRecord] = []
    outputs = llm.generate(PROMPTS, greedy(logprobs=2), switches={2: (dst, "spread")}, on_step=records.append)
    for a, b in zip(outputs, fixed, strict=True):
        assert max_logprob_difference(a, b) <= TOLERANCE
        assert a.num_preemptions == 0 and a.error is None
    assert llm.layout == dst
    assert_all_free(llm)
    moves = [r.layers_ahead for r in records if r.switch_mode == "spread"]
    assert moves in ([0, 1, 2, 3], []), "one layer more ran in the destination at every step."
    assert [r.switch is not None for r in records if r.switch_mode].count(True) == 1
    unannounced = set(llm.engine.programs._programs) - set(llm.engine.blueprint.keys())
    assert not unannounced, "an engine that compiles ahead would not have these."


def test_what_comes_ends_and_is_given_up_during_a_spread_switch(spreading: LLM, alone: LLM) -> None:
    llm = go(spreading, "dp")
    first = [add(llm, prompt, greedy(3 + i, logprobs=0)) for i, prompt in enumerate(PROMPTS)]
    late = []

    def each(step: int) -> None:
        if step == 2:
            llm.engine.request_switch("tp", "spread")
        if step in (3, 4, 5):
            late.append(add(llm, PROMPTS[step], greedy(6, logprobs=0)))
        if step == 4:
            llm.engine.abort(first[-1].name)

    since = len(llm.records)
    drive(llm, each)
    judge(llm, alone, first + late, 1, since)


def test_a_mode_that_was_not_built_is_refused(llm: LLM) -> None:
    with pytest.raises(LayoutError, match=r"switch mode 'spread' is not among the allowed splash, blocking"):
        llm.generate(PROMPTS[0], greedy(), switches={0: ("dp", "spread")})
    with pytest.raises(LayoutError, match=r"switch mode 'fast' is not among"):
        llm.switch("dp", mode="fast")
    assert not llm.engine.busy


@pytest.mark.slow
def test_a_walk_of_switches_some_spread(spreading: LLM, alone: LLM) -> None:
    since = len(spreading.records)
    requests = walk(spreading, 60, 5, modes=("splash", "spread"))
    judge(spreading, alone, requests, 60, since)
    modes = [record.switch_mode for record in spreading.records[since:] if record.switch]
    assert min(modes.count("splash"), modes.count("spread")) > 10
