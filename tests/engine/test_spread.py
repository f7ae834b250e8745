"""A switch spread over several steps changes no output, wherever requests come, end and are given up meanwhile."""

import random
from pathlib import Path

import pytest

from splash_jax import LLM
from tests.engine.conftest import GAP, TOLERANCE, add, go, greedy, mixed_prompts, smallest_gap, tokens
from tests.engine.test_random_walk import judge
from tests.support import LAYOUTS, assert_all_free, make_llm, max_logprob_difference

PROMPTS = mixed_prompts(54)


@pytest.fixture(scope="module")
def spreading(small: Path) -> LLM:
    return make_llm(small, compile_ahead=False, switch_modes=("splash", "spread"), spread_layers=1, spread_parts=3)


@pytest.mark.parametrize("src,dst", [("tp", "dp"), ("dp", "tp"), ("cp", "dop")])
def test_spread(spreading: LLM, src: str, dst: str) -> None:
    llm = go(spreading, src)
    fixed = llm.generate(PROMPTS, greedy(logprobs=2))
    go(llm, src)
    records = []
    future = None

    def on_step(record) -> None:
        nonlocal future
        records.append(record)
        if future is None and len(records) == 3:
            future = llm.engine.request_switch(dst, "spread")

    outputs = llm.generate(PROMPTS, greedy(logprobs=2), on_step=on_step)
    assert future is not None and str(future.result().after.layout) == dst
    for a, b in zip(outputs, fixed, strict=True):
        assert max_logprob_difference(a, b) <= TOLERANCE
    print([(r.layout, r.layers_ahead, r.rows) for r in records])
    assert_all_free(llm)
