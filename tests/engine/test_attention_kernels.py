"""An engine as it hands its steps to GPU kernels. Their oracles stand in for them here, and refuse what is wrong."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_attention import gpu
from pallas_kernels.mla_decode import mla_decode, plan_decode
from pallas_kernels.mla_prefill import mla_prefill
from splash_jax import LLM
from splash_jax.engine import build
from splash_jax.ownership import Bucket
from splash_jax.runtime.step import first_tiles
from tests.engine.conftest import GAP, TOLERANCE, go, greedy, mixed_prompts, smallest_gap
from tests.support import USUAL, make_llm, max_logprob_difference


@pytest.fixture(scope="module")
def kernels(small: Path) -> Iterator[tuple[LLM, list[dict[str, Any]]]]:
    """An engine that takes its devices for H200s, and what its programs hand to prompt kernels."""
    asked: list[dict[str, Any]] = []

    def decode(q: Any, pool: Any, pages: Any, seen: Any, *, work: Any, backend: str, **options: Any) -> Any:
        """NaN where the host cut other work than the rows have."""
        wanted = plan_decode(seen, heads=q.shape[1], fp8=False, backend=backend, chip="h200")
        right = (work.items == wanted.items).all() & (work.first == wanted.first).all()
        out, lse = mla_decode(q, pool, pages, seen, backend="ref", **options)
        return jnp.where(right, out, jnp.nan), lse

    def prefill(*args: Any, **options: Any) -> Any:
        asked.append(options)
        return mla_prefill(*args, **options | {"backend": "ref"})

    patch = pytest.MonkeyPatch()
    patch.setattr(build, "attention_kernels", lambda asked, kind: ("gpu", "h200"))
    patch.setattr(gpu.kernels, "mla_decode", decode)
    patch.setattr(gpu.prefill, "mla_prefill", prefill)
    try:
        yield make_llm(small, layouts=USUAL), asked
    finally:
        patch.undo()


@pytest.mark.parametrize("layout", USUAL)
def test_kernels_get_all_that_a_step_has(kernels: tuple[LLM, list[dict[str, Any]]], llm: LLM, layout: str) -> None:
    """Prompts of several tiles, and rows that decode beside them, as XLA's engine computes them."""
    ours = go(kernels[0], layout).generate(mixed_prompts(3), greedy(8, logprobs=2))
    theirs = go(llm, layout).generate(mixed_prompts(3), greedy(8, logprobs=2))
    for a, b in zip(ours, theirs, strict=True):
        assert max_logprob_difference(a, b) <= TOLERANCE
        if smallest_gap([b]) > GAP:
            assert a.outputs[0].token_ids == b.outputs[0].token_ids


def test_heads_keep_their_own_widths_where_nothing_is_exchanged(kernels: tuple[LLM, list[dict[str, Any]]]) -> None:
    """In tp and dp; where heads or parts of histories meet elsewhere, queries cross as they meet latents."""
    own = [options.get("w_uk") is not None for options in kernels[1]]
    assert True in own and False in own
    assert all((options["sequence"] is not None) == mine for options, mine in zip(kernels[1], own, strict=True))


def test_the_tiles_of_a_request_name_its_first():
    slots = np.concatenate([[3, 1], np.repeat([3, 3, 1, 3, 0], 4)]).astype(np.int32)  # decode rows are no tiles
    got = first_tiles(jnp.asarray(slots), Bucket(decode=2, tiles=5, tile=4))
    np.testing.assert_array_equal(got, [0, 0, 2, 0, 4])
    assert first_tiles(jnp.asarray(slots[:2]), Bucket(decode=2, tiles=0, tile=4)) is None
