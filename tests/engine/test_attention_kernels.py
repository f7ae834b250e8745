"""An engine as it hands its steps to GPU kernels. Their oracles stand in for them here, and refuse what is wrong."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_attention import gpu
from pallas_kernels.mla_decode import api, mla_decode, plan_decode
from pallas_kernels.mla_prefill import mla_prefill
from pallas_kernels.page_move import gather_pages, scatter_pages
from splash_jax import LLM
from splash_jax.engine import build
from splash_jax.layouts import make_layout
from splash_jax.ownership import Bucket
from splash_jax.runtime import pages
from splash_jax.runtime.step import first_tiles
from tests.engine.conftest import GAP, TOLERANCE, go, greedy, mixed_prompts, smallest_gap
from tests.support import LAYOUTS, make_llm, max_logprob_difference


def oracle(kernel: Any, *args: Any, backend: str) -> Any:
    assert backend == "triton"
    return kernel(*args, backend="ref")


@pytest.mark.parametrize(
    ("layout", "tile", "kernel"),
    [
        ("tp", None, "triton"),
        ("dop", 1, "hopper"),
        *(pytest.param(name, None, "triton", marks=pytest.mark.slow) for name in LAYOUTS if name != "tp"),
    ],
)
def test_kernels_get_all_that_a_step_has(
    small: Path, llm: LLM, layout: str, tile: int | None, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several tiles, and rows that decode beside them, in an engine that takes its devices for H200s.

    Triton's programs take an item each; Hopper's, which more heads than these would go to, several. Heads keep their
    own widths where nothing is exchanged; elsewhere queries cross as they meet latents.
    """
    asked: list[dict[str, Any]] = []

    def decode(q: Any, pool: Any, pages: Any, seen: Any, *, work: Any, backend: str, **options: Any) -> Any:
        """NaN where the host cut other work than the rows have."""
        wanted = plan_decode(seen, heads=q.shape[1], fp8=False, backend=backend, chip="h200")
        assert work.cut == wanted.cut
        right = jnp.array([(a == b).all() for a, b in zip(*map(jax.tree.leaves, (work, wanted)), strict=True)]).all()
        out, lse = mla_decode(q, pool, pages, seen, backend="ref", **options)
        return jnp.where(right, out, jnp.nan), lse

    def prefill(*args: Any, **options: Any) -> Any:
        asked.append(options)
        return mla_prefill(*args, **options | {"backend": "ref"})

    for chooser in (api, gpu.kernels):
        monkeypatch.setattr(chooser, "order_of", lambda chip, heads, *, fp8=False: (kernel, "ref"))
    monkeypatch.setattr(build, "attention_kernels", lambda asked, kind: ("gpu", "h200"))
    monkeypatch.setattr(gpu.kernels, "mla_decode", decode)
    monkeypatch.setattr(gpu.prefill, "mla_prefill", prefill)
    for move in (gather_pages, scatter_pages):
        monkeypatch.setattr(pages, move.__name__, partial(oracle, move))
    ours = make_llm(small, layout=layout, layouts=(layout,), prefill_tile=tile)
    expected = go(llm, layout).generate(mixed_prompts(3), greedy(8, logprobs=2))
    for a, b in zip(ours.generate(mixed_prompts(3), greedy(8, logprobs=2)), expected, strict=True):
        assert max_logprob_difference(a, b) <= TOLERANCE
        if smallest_gap([b]) > GAP:
            assert a.outputs[0].token_ids == b.outputs[0].token_ids
    local = make_layout(layout, {"rank": 4}).attends_locally
    assert bool(asked) == (tile != 1), "rows of prompts in tiles of one are decode rows"
    assert all((options["sequence"] is not None, "w_uk" in options) == (local, local) for options in asked)


def test_the_tiles_of_a_request_name_its_first():
    slots = np.concatenate([[3, 1], np.repeat([3, 3, 1, 3, 0], 4)]).astype(np.int32)  # decode rows are no tiles
    got = first_tiles(jnp.asarray(slots), Bucket(decode=2, tiles=5, tile=4))
    np.testing.assert_array_equal(got, [0, 0, 2, 0, 4])
    assert first_tiles(jnp.asarray(slots[:2]), Bucket(decode=2, tiles=0, tile=4)) is None
