"""Attention over selected tokens against numpy float64; every token that is not selected is NaN."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given as draw
from hypothesis import settings
from hypothesis import strategies as st

from pallas_kernels.launch import refuse_wide
from pallas_kernels.mla_decode import TritonConfig
from pallas_kernels.mla_decode.work import WAVES
from pallas_kernels.sparse_mla import plan_sparse, sparse_mla
from pallas_kernels.sparse_mla.places import counts_of, places_of
from pallas_kernels.sparse_mla.triton import plan
from tests.kernels.mla_cases import TOLERANCE, Case, Given, make, reference, within

SMALL = TritonConfig(block_heads=16, block_tokens=16, warps=4, stages=2, workers=3)


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """`tile` query rows of every sequence, each with at most `k` tokens of its own."""

    case: Case
    k: int
    tile: int = 1


CASES = {
    "decode": Sparse(case=Case(lengths=(0, 1, 37, 130, 16, 64, 3)), k=40),
    "prompt tiles": Sparse(case=Case(lengths=(70, 0, 33), page_size=64, heads=20), k=19, tile=5),
    "fp8": Sparse(case=Case(lengths=(0, 90, 17), latent=256, page_size=16, fp8=True), k=33, tile=2),
}


@cache
def problem(name: str) -> tuple[Given, np.ndarray, Given]:
    """What the kernel is handed, the lists, and the same as dense histories of the selected tokens alone."""
    sparse = CASES[name]
    case = sparse.case
    given, rng = make(case), np.random.default_rng(1)
    S, K, D = len(case.lengths), sparse.k, case.latent + case.rotary
    R = S * sparse.tile
    q = np.asarray(jnp.asarray(rng.normal(0, 0.6 * (32 / case.latent) ** 0.5, (R, case.heads, D)), jnp.bfloat16))
    selected = np.full((R, K), -1, np.int32)
    used = np.zeros(given.rows.shape[:2], bool)
    dense, held = np.full((R, K, D), np.nan, np.float32), np.zeros(R, np.int32)
    for r in range(R):
        s = r // sparse.tile
        own = rng.permutation(case.lengths[s])[: rng.integers(min(case.lengths[s], 1), K + 1)]
        columns = np.sort(rng.permutation(K)[: len(own)]) if r % 2 else np.arange(len(own))  # holes, or none
        selected[r, columns] = own
        at = given.pages[s, own // case.page_size], own % case.page_size
        used[at] = True
        dense[r, : len(own)], held[r] = given.rows[at], len(own)
    poison = np.uint8(0xFF) if case.fp8 else np.float32(np.nan)
    pool = np.where(used[..., None], given.pool, poison)
    rows = np.arange(R, dtype=np.int32)[:, None]
    q = q.astype(np.float32)
    return given._replace(q=q, pool=pool), selected, Given(q, dense, dense, rows, held)


def run(name: str, dtype: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    given, selected, _ = problem(name)
    case = CASES[name].case
    pool = jnp.asarray(given.pool) if case.fp8 else jnp.asarray(given.pool).astype(dtype)
    attend = jax.jit(partial(sparse_mla, value_width=case.latent, **options))
    out, lse = attend(jnp.asarray(given.q).astype(dtype), pool, selected, given.pages)
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    return np.asarray(out), np.asarray(lse)


@pytest.mark.parametrize("name", CASES)
def test_triton_is_attention_over_the_selected_tokens(name):
    """Few rows in several items each, many rows in one each; with holes in the lists and without."""
    kind = {"decode": "float32", "prompt tiles": "bfloat16", "fp8": "fp8, unscaled"}[name]
    dtype = jnp.float32 if kind == "float32" else jnp.bfloat16
    got = run(name, dtype, backend="triton", config=SMALL, interpret=True)
    dense = problem(name)[2]
    assert within(got, reference(CASES[name].case, dense), kind)
    assert (got[0][dense.held == 0] == 0).all() and (got[1][dense.held == 0] == -np.inf).all()


@pytest.mark.parametrize("name", CASES)
def test_ref_is_attention_over_the_selected_tokens(name):
    """With the float32 tolerance in both formats: it rounds nothing. Without a GPU it is what the op chooses."""
    assert within(run(name, jnp.float32), reference(CASES[name].case, problem(name)[2]), "float32")


def elsewhere(name: str, move: Any) -> Given:
    """The dense history that a kernel would see that read token `move(token, page_size)` for every token."""
    (given, selected, dense), case = problem(name), CASES[name].case
    tokens = np.nan_to_num(given.rows)
    rows = dense.rows.copy()
    for r, own in enumerate(selected):
        moved = move(own[own >= 0], case.page_size)
        rows[r, : len(moved)] = tokens[
            given.pages[r // CASES[name].tile, moved // case.page_size], moved % case.page_size
        ]
    return dense._replace(rows=rows)


def with_a_first_token(name: str) -> Given:
    """What a kernel would see that takes -1 for token 0: one token more wherever a list has a hole."""
    (given, selected, dense), tile = problem(name), CASES[name].tile
    rows, held = np.nan_to_num(dense.rows), dense.held.copy()
    for r, own in enumerate(selected):
        if (own < 0).any():
            rows[r, held[r]] = np.nan_to_num(given.rows)[given.pages[r // tile, 0], 0]
            held[r] += 1
    return dense._replace(rows=rows, held=held)


def twice(name: str) -> Given:
    dense = problem(name)[2]
    rows, held = dense.rows.copy(), dense.held.copy()
    for r, n in enumerate(held):
        if 0 < n < rows.shape[1]:
            rows[r, n], held[r] = rows[r, 0], n + 1
    return dense._replace(rows=rows, held=held)


# Bugs a kernel could have. The tolerance is fit for use only while it rejects them all.
MUTANTS = {
    "last token lost": lambda name, case, x: reference(case, x, lambda t, n: t < max(1, n - 1)),
    "first block lost": lambda name, case, x: reference(case, x, lambda t, n: (t < n) & ((t >= 16) | (n <= 16))),
    "the token before": lambda name, case, x: reference(case, elsewhere(name, lambda t, _: np.maximum(t - 1, 0))),
    "the page before": lambda name, case, x: reference(
        case, elsewhere(name, lambda t, size: np.maximum(t - size, t % size))
    ),
    "no token is token 0": lambda name, case, x: reference(case, with_a_first_token(name)),
    "a token twice": lambda name, case, x: reference(case, twice(name)),
    "scale wrong": lambda name, case, x: reference(case, x, scale=1.05),
    "parts merged by their mean": lambda name, case, x: reference(case, x, parts=2),
    "unselected tokens read": lambda name, case, x: (reference(case, x)[0] + np.nan, reference(case, x)[1]),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("kind", TOLERANCE)
def test_the_tolerance_rejects(mutant, kind):
    name = "fp8" if kind.startswith("fp8") else "decode"
    case, dense = CASES[name].case, problem(name)[2]
    want = reference(case, dense)
    assert within(want, want, kind)
    assert not within(MUTANTS[mutant](name, case, dense), want, kind)


resolve = jax.jit(places_of, static_argnames="page_size")


@settings(max_examples=40)
@draw(st.lists(st.integers(-3, 20), min_size=12, max_size=12), st.permutations(range(8)))
def test_places_are_looked_up_token_by_token(tokens, order):
    """Two sequences of two rows, two pages of four; whatever is outside them is nothing."""
    selected, pages = np.reshape(tokens, (4, 3)).astype(np.int32), np.reshape(order, (4, 2))[:2].astype(np.int32)
    places = np.asarray(resolve(selected, pages, page_size=4))
    for r in range(4):
        want = [4 * pages[r // 2, t // 4] + t % 4 if 0 <= t < 8 else -1 for t in selected[r]]
        assert places[r].tolist() == want
        assert counts_of(jnp.asarray(places))[r] == max(
            [i + 1 for i, place in enumerate(want) if place >= 0], default=0
        )


def test_many_rows_are_not_cut():
    few, many = (jnp.full(n, 40, jnp.int32) for n in (WAVES * SMALL.workers - 1, WAVES * SMALL.workers))
    cut = jax.eval_shape(partial(plan, config=SMALL), few)
    assert len(cut.items) == WAVES * SMALL.workers + len(few)
    items = np.asarray(plan(many, SMALL).items)
    assert items[:, 0].tolist() == list(range(len(many))) and (items[:, 1:] == [0, 3, 1]).all()


def arguments(**changes: Any) -> dict[str, Any]:
    sizes = {"q": (4, 16, 48), "pool": (5, 4, 48), "selected": (4, 6), "pages": (2, 3)} | changes
    dtypes = {"pages": jnp.int32, "selected": jnp.int32}
    return {name: jnp.zeros(size, dtypes.get(name, jnp.bfloat16)) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("changes", "options", "error", "words"),
    [
        (
            {"pool": (5, 4, 40)},
            {},
            ValueError,
            "queries of 48 columns need bfloat16 rows of 48, but the pool's have 40",
        ),
        ({"selected": (3, 6)}, {}, ValueError, r"4 query rows, but tokens selected in shape \(3, 6\): give one list"),
        (
            {"pages": (3, 3)},
            {},
            ValueError,
            "4 query rows are no equal shares of 3 sequences with pages: pad every tile",
        ),
        ({}, {"value_width": 48}, ValueError, "latent width 48 is not inside the row of 48 columns"),
        ({}, {"backend": "cuda"}, ValueError, "sparse_mla has no backend 'cuda'; it has: triton, ref"),
        ({}, {"chip": "v5e"}, ValueError, "no chip 'v5e' is known; known are: h100, h200, b200"),
        ({}, {"backend": "triton"}, ValueError, r"triton needs to know its GPU: name a chip \(h100, h200, b200\)"),
        ({}, {"backend": "triton", "chip": "h200", "value_width": 24}, NotImplementedError, "the latent width is 24"),
        ({}, {"backend": "triton", "chip": "h100"}, NotImplementedError, r"sparse_mla/tuning\.json has no triton"),
    ],
)
def test_what_cannot_be_is_refused(changes, options, error, words):
    with pytest.raises(error, match=words):
        sparse_mla(**arguments(**changes), **{"value_width": 32} | options)


def test_work_of_another_configuration_is_refused():
    plan_of = partial(plan_sparse, heads=16, fp8=False, chip="h200")
    other = jax.eval_shape(plan_of, jax.ShapeDtypeStruct((4,), jnp.int32))
    with pytest.raises(
        ValueError, match=r"work was cut in blocks of \d+ for \d+ workers, but the kernel takes 16 and 3"
    ):
        sparse_mla(**arguments(), value_width=32, backend="triton", config=SMALL, work=other)


def test_pools_beyond_32_bit_offsets_are_refused():
    """Between 2 and 4 GiB of bytes. Views of such a pool in wider elements are addressed rightly, and so is more."""
    wide = jax.ShapeDtypeStruct((2**22, 1, 656), jnp.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="2751463424 elements of float8_e4m3fn are beyond the 32-bit offsets"):
        refuse_wide(wide)
    refuse_wide(jax.ShapeDtypeStruct((2**22, 1, 328), jnp.bfloat16), jax.ShapeDtypeStruct((2**23, 1, 656), jnp.uint8))
