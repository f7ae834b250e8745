"""S11: padding rows reach no real row, whatever they hold and however many there are."""

from pathlib import Path

import jax
import numpy as np
import pytest

from splash_jax import LLM
from splash_jax.engine import StepRecord
from splash_jax.engine import steps as steps_module
from tests.engine.conftest import go, greedy, tokens
from tests.support import EACH_LAYOUT, LAYOUTS, make_llm, max_logprob_difference

SPARE = 511  # a token that no prompt here has
PROMPTS = [[t % SPARE for t in tokens(n, 70 + n)] for n in (5, 21, 2)]


def set_embedding(llm: LLM, value: np.ndarray | float) -> np.ndarray:
    """Give the spare token another embedding; returns the one it had."""
    weights = llm.engine.state.weights
    table = np.array(weights["embed"])
    before = table[SPARE].copy()
    table[SPARE] = value
    weights["embed"] = jax.device_put(table, weights["embed"].sharding)
    return before


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_what_padding_rows_hold_reaches_no_real_row(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, layout: str, value: float
) -> None:
    build, padded = steps_module.build_batch, []

    def build_padded(*args: object) -> object:
        batch, places = build(*args)  # type: ignore[arg-type]
        empty = batch.rows[2] < 0
        padded.append(int(empty.sum()))
        batch.rows[0][empty] = SPARE
        return batch, places

    clean = go(llm, layout).generate(PROMPTS, greedy(10, logprobs=2))
    assert all(SPARE not in o.outputs[0].token_ids for o in clean), "choose other prompts: the spare token was drawn."
    before = set_embedding(llm, value)
    monkeypatch.setattr(steps_module, "build_batch", build_padded)
    try:
        poisoned = llm.generate(PROMPTS, greedy(10, logprobs=2))
    finally:
        set_embedding(llm, before)
    assert min(padded) > 0
    for a, b in zip(poisoned, clean, strict=True):
        assert max_logprob_difference(a, b) <= 1e-6


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_a_token_that_is_not_finite_ends_its_own_request_only(llm: LLM, layout: str) -> None:
    clean = go(llm, layout).generate(PROMPTS, greedy(6, logprobs=2))
    before = set_embedding(llm, np.nan)
    try:
        outputs = llm.generate([PROMPTS[0], [7, SPARE, 9], *PROMPTS[1:]], greedy(6, logprobs=2))
    finally:
        set_embedding(llm, before)
    bad = outputs.pop(1)
    assert bad.outputs[0].finish_reason == "error" and "not finite" in (bad.error or "")
    for a, b in zip(outputs, clean, strict=True):
        assert max_logprob_difference(a, b) <= 1e-5


SIZES = [  # (layout, sizes that decode programs are compiled for, requests at once): the first shares most programs
    pytest.param("dop", (4, 8), (4, 5, 8), id="dop-4-to-5"),
    *(pytest.param(n, (4, 8, 12), (4, 5, 8, 9), id=f"{n}-all", marks=pytest.mark.slow) for n in LAYOUTS),
]


@pytest.mark.parametrize(("layout", "sizes", "counts"), SIZES)
def test_the_number_of_padding_rows_does_not_matter(
    small: Path, layout: str, sizes: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    llm = make_llm(
        small, layout=layout, layouts=(layout,), max_num_seqs=sizes[-1], decode_buckets=sizes[:-1], compile_ahead=True,
        scoring=False,
    )  # fmt: skip
    expected = llm.generate([PROMPTS[0]], greedy(8, logprobs=2))[0]
    used: dict[int, set[str]] = {}
    for count in counts:
        records: list[StepRecord] = []
        outputs = llm.generate([PROMPTS[0]] * count, greedy(8, logprobs=2), on_step=records.append)
        assert max(max_logprob_difference(output, expected) for output in outputs) <= 1e-5
        assert sum(r.rows for r in records) == count * (len(PROMPTS[0]) + 7)
        assert sum(r.drawn for r in records) == count * 8
        used[count] = {r.bucket for r in records if r.rows == r.drawn == count}
        assert len(used[count]) == 1
    assert used[4] != used[5] == used[8]
    assert 9 not in counts or used[9] != used[8]
