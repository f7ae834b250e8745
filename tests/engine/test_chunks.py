"""S15: where a prompt is cut into chunks changes nothing, and only its last row is sampled."""

import itertools

import numpy as np
import pytest

from splash_jax import LLM
from splash_jax.engine import StepRecord
from tests.engine.conftest import TOLERANCE, go, greedy, log_softmax, tokens
from tests.support import EACH_LAYOUT

LENGTHS = (1, 3, 4, 15, 16, 17, 31, 32, 33, 48)


def best_value(logits: np.ndarray, token: int) -> float:
    values = log_softmax(logits[-1])
    assert values[token] >= values.max() - TOLERANCE
    return float(values[token])


@pytest.fixture(scope="module")
def one_piece(alone: LLM) -> dict[int, np.ndarray]:
    """Logits of every prompt, from one device in chunks that no prompt fills."""
    return {n: alone.logits(tokens(n, n)) for n in LENGTHS}


@pytest.mark.parametrize("new", (1, 2))
@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_a_prompt_of_any_length_begins_right(llm: LLM, one_piece: dict[int, np.ndarray], layout: str, new: int) -> None:
    go(llm, layout)
    for length in LENGTHS:
        records: list[StepRecord] = []
        output = llm.generate([tokens(length, length)], greedy(new, logprobs=0), on_step=records.append)[0].outputs[0]
        assert len(output.token_ids) == new and output.finish_reason == "length"
        token = output.token_ids[0]
        assert abs(output.logprobs[0][token].logprob - best_value(one_piece[length], token)) <= TOLERANCE  # type: ignore[index]
        assert sum(r.rows for r in records) == length + new - 1
        assert sum(r.drawn for r in records) == new
        assert all(r.rows > 0 for r in records), "an empty chunk was run."


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_two_requests_share_one_steps_room(llm: LLM, one_piece: dict[int, np.ndarray], layout: str) -> None:
    go(llm, layout)
    for pair in itertools.combinations((3, 16, 17, 33, 48), 2):
        records: list[StepRecord] = []
        outputs = llm.generate([tokens(n, n) for n in pair], greedy(2, logprobs=0), on_step=records.append)
        for n, output in zip(pair, outputs, strict=True):
            token = output.outputs[0].token_ids[0]
            value = output.outputs[0].logprobs[0][token].logprob  # type: ignore[index]
            assert abs(value - best_value(one_piece[n], token)) <= TOLERANCE
        assert sum(r.rows for r in records) == sum(pair) + 2
        assert max(r.rows for r in records) <= 64 + 8


@pytest.mark.parametrize("layout", EACH_LAYOUT)
@pytest.mark.parametrize("length", LENGTHS)
def test_logits_of_every_row_are_one_devices(
    llm: LLM, one_piece: dict[int, np.ndarray], layout: str, length: int
) -> None:
    np.testing.assert_allclose(
        go(llm, layout).logits(tokens(length, length)), one_piece[length], rtol=0, atol=TOLERANCE
    )
