"""S10: randomness belongs to the request. A draw depends on (seed, sample, token) and on nothing around it."""

import pytest

from splash_jax import LLM, SamplingParams
from tests.engine.conftest import Ballast, add, drive, go, tokens
from tests.support import EACH_LAYOUT

PROMPT = tokens(6, 42)
SEEDED = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True, seed=42)
UNSEEDED = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def drawn(shared: LLM) -> tuple[int, ...]:
    """What the seeded request draws, alone."""
    return shared.generate([PROMPT], SEEDED)[0].outputs[0].token_ids


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_a_seed_draws_the_same_alone_and_in_any_row_of_any_layout(
    llm: LLM, drawn: tuple[int, ...], layout: str
) -> None:
    go(llm, layout)
    assert llm.generate([PROMPT], SEEDED)[0].outputs[0].token_ids == drawn
    for row in (0, 3, 5):
        prompts = [tokens(3 + i, i) for i in range(5)]
        params = [UNSEEDED] * 5
        prompts.insert(row, PROMPT)
        params.insert(row, SEEDED)
        assert llm.generate(prompts, params)[row].outputs[0].token_ids == drawn


def test_a_seed_draws_the_same_across_switches(llm: LLM, drawn: tuple[int, ...]) -> None:
    go(llm, "tp")
    switches = {2: "dop", 5: "cp", 7: "dp", 9: "dop", 11: "tp"}
    prompts = [tokens(4, 1), tokens(9, 2), PROMPT]
    outputs = llm.generate(prompts, [UNSEEDED, UNSEEDED, SEEDED], switches=switches)
    assert outputs[2].outputs[0].token_ids == drawn


def test_a_seed_draws_the_same_after_preemption(llm: LLM, drawn: tuple[int, ...]) -> None:
    go(llm, "tp")
    older, request = add(llm, tokens(4, 1), UNSEEDED), add(llm, PROMPT, SEEDED)
    ballast = Ballast(llm)

    def each(step: int) -> None:
        if step == 7:
            ballast.fill(leave=0)
        if request.preemptions:
            ballast.release()

    drive(llm, each)
    for finished in (older, request):
        llm.engine.take(finished.name)
    assert request.preemptions == 1 and tuple(request.output_ids) == drawn


def test_samples_of_a_seed_differ_and_come_again(llm: LLM, drawn: tuple[int, ...]) -> None:
    four = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True, seed=42, n=4)
    first, again = (llm.generate([PROMPT], four)[0].outputs for _ in range(2))
    assert [o.index for o in first] == [0, 1, 2, 3]
    assert first[0].token_ids == drawn
    assert len({o.token_ids for o in first}) == 4
    assert [o.token_ids for o in first] == [o.token_ids for o in again]


def test_unseeded_repeats_differ(llm: LLM) -> None:
    assert len({o.outputs[0].token_ids for o in llm.generate([PROMPT] * 3, UNSEEDED)}) == 3
    four = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True, n=4)
    assert len({o.token_ids for o in llm.generate([PROMPT], four)[0].outputs}) == 4


def test_other_seeds_draw_other_tokens(llm: LLM, drawn: tuple[int, ...]) -> None:
    other = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True, seed=43)
    assert llm.generate([PROMPT], other)[0].outputs[0].token_ids != drawn
