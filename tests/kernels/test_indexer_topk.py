"""The indexer's logits against numpy float64, and its selection against `jax.lax.top_k`, bit by bit."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given as draw
from hypothesis import settings
from hypothesis import strategies as st

from pallas_kernels.indexer_topk import (
    LogitsConfig,
    SelectConfig,
    TritonConfig,
    indexer_topk,
    quantize_queries,
    ref,
    top_k,
    triton,
)
from pallas_kernels.mla_decode import pack_fp8, unpack_fp8

LOGITS = LogitsConfig(block_tokens=16, blocks=2, rows=2, warps=4, stages=2, fp8_products=True)
WHOLE = SelectConfig(block=64, chunk=512, warps=4)
CHUNKS = SelectConfig(block=32, chunk=64, warps=4)
R, N, K = 8, 300, 24


def best(row: np.ndarray, length: int, k: int) -> list[int]:
    """In numpy: the k largest, of equal ones the first, in ascending order."""
    order = np.lexsort((np.arange(length), -row[:length].astype(np.float64)))[:k]
    return sorted(order.tolist()) + [-1] * (k - min(k, length))


def rows_to_choose_from() -> tuple[np.ndarray, np.ndarray]:
    """Eight rows, and how many columns of each count; behind them NaN."""
    x = np.random.default_rng(0).normal(size=(R, N)).astype(np.float32)
    x[1] = np.round(x[1] * 2)  # ties by the dozen, some of them -0.0
    x[2], x[2, ::3] = 0.0, -0.0
    x[3, :] = -np.inf
    x[3, [5, 250]] = (-1e30, np.inf)
    x[4] = -np.abs(x[4]) * np.float32(1e-30)
    lengths = np.array([N, N - 1, 200, 290, 65, K, 5, 0], np.int32)
    return np.where(np.arange(N) < lengths[:, None], x, np.nan), lengths


@cache
def chosen_by(config: SelectConfig | None, k: int) -> Callable[..., jax.Array]:
    options: dict[str, Any] = {} if config is None else {"backend": "triton", "config": config, "interpret": True}
    return jax.jit(partial(top_k, k=k, **options))


@pytest.mark.parametrize(
    ("config", "k"),
    [(None, K), (WHOLE, K), (CHUNKS, K), pytest.param(WHOLE, 310, marks=pytest.mark.slow)],
    ids=["ref", "one chunk", "five chunks", "more than there are"],
)
def test_the_largest_are_chosen_exactly(config, k):
    x, lengths = rows_to_choose_from()
    got = np.asarray(chosen_by(config, k)(x, lengths))
    assert got.dtype == np.int32
    for row, length, found in zip(x, lengths, got, strict=True):
        assert found.tolist() == best(row, length, k)


numbers = st.floats(width=32, allow_nan=False, allow_subnormal=False)


@settings(max_examples=30)
@draw(
    st.lists(numbers, min_size=1, max_size=6),
    st.lists(st.integers(0, N), min_size=R, max_size=R),
    st.integers(0, 2**32 - 1),
)
@pytest.mark.parametrize("config", [WHOLE, CHUNKS], ids=["one chunk", "five chunks"])
def test_any_floats_are_ordered_as_lax_top_k_orders_them(config, values, lengths, seed):
    """Of few different values, infinities and -0.0 among them, so that most rows end in ties."""
    x = np.random.default_rng(seed).choice(np.float32(values), (R, N))
    n = np.asarray(lengths, np.int32)
    np.testing.assert_array_equal(chosen_by(config, K)(x, n), chosen_by(None, K)(x, n))


def problem(fp8: bool, whole: bool) -> dict[str, Any]:
    """Three sequences of two rows in pages of 8; `whole` numbers leave nothing to round. NaN where no token lies."""
    rng = np.random.default_rng(2)
    S, tile, J, C, page, W = 3, 2, 5, 128, 8, 6
    lengths = np.array([[44, 45], [0, 9], [48, 17]], np.int32)
    pages = rng.permutation(30)[: S * W].reshape(S, W).astype(np.int32)
    if whole:
        keys, q = rng.integers(-2, 3, (30, page, C)), rng.integers(-1, 2, (S * tile, J, C))
        weights = rng.choice([-1.0, -0.5, 0.5, 1.0], (S * tile, J))
    else:
        keys, q, weights = (rng.normal(size=size) for size in ((30, page, C), (S * tile, J, C), (S * tile, J)))
    keys, q = (np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)) for x in (keys, q))
    q, weights = jnp.asarray(q, jnp.bfloat16), jnp.asarray(weights, jnp.float32)
    if fp8:
        pool = np.array(pack_fp8(jnp.asarray(keys), C))
        if whole:  # scales that are powers of two
            pool[..., :C] = jnp.asarray(keys).astype(jnp.float8_e4m3fn).view(jnp.uint8)
            pool[..., C:] = np.exp2(rng.integers(-1, 2, (30, page, 1))).astype(np.float32).view(np.uint8)
            q = q.astype(jnp.float8_e4m3fn)
        else:
            q, weights = quantize_queries(q, weights)
        keys = np.asarray(unpack_fp8(jnp.asarray(pool), C))
    else:
        pool = keys
    there = np.zeros((30, page), bool)
    for s in range(S):
        token = np.arange(lengths[s].max())
        there[pages[s, token // page], token % page] = True
    pool = np.where(there[..., None], pool, np.uint8(0xFF) if fp8 else np.nan)
    pool = jnp.asarray(pool) if fp8 else jnp.asarray(pool, jnp.bfloat16)
    args = {"q": q, "weights": weights, "pool": pool, "pages": pages, "lengths": lengths.reshape(-1)}
    return args | {"keys": np.where(there[..., None], keys, np.nan)}


def in_float64(
    x: dict[str, Any], relu: Any = lambda dots: np.maximum(dots, 0), token: int = 0, heads: slice = slice(None)
) -> np.ndarray:
    """Row by row; zero behind a row's length."""
    q, weights, lengths = (np.asarray(x[name]).astype(np.float64) for name in ("q", "weights", "lengths"))
    tile = len(q) // len(x["pages"])
    out = np.zeros((len(q), x["pages"].shape[1] * x["pool"].shape[1]))
    for r in range(len(q)):
        n = int(lengths[r])
        keys = np.nan_to_num(x["keys"][x["pages"][r // tile]].reshape(-1, q.shape[-1]).astype(np.float64))
        out[r, :n] = weights[r, heads] @ relu(q[r, heads] @ np.roll(keys, token, 0)[:n].T)
    return out


def near(got: np.ndarray, want: np.ndarray) -> bool:
    """Products are exact; what float32 loses in sums of 128 of them, then of 5, is 2e-6 of the largest logit (60)."""
    return bool((np.abs(got - want) < 1e-4).all())


LOGIT_MUTANTS = {
    "no relu": lambda x: in_float64(x, relu=lambda dots: dots),
    "absolute": lambda x: in_float64(x, relu=np.abs),
    "a head lost": lambda x: in_float64(x, heads=slice(1, None)),
    "the next token": lambda x: in_float64(x, token=-1),
    "weights of the row before": lambda x: in_float64(x | {"weights": np.roll(x["weights"], 1, 0)}),
    "a page for another": lambda x: in_float64(x | {"pages": x["pages"][:, [1, 0, 2, 3, 4, 5]]}),
    "rounded to bfloat16": lambda x: np.asarray(jnp.asarray(in_float64(x), jnp.bfloat16).astype(jnp.float32)),
}


@pytest.mark.parametrize("mutant", LOGIT_MUTANTS)
def test_the_tolerance_of_logits_rejects(mutant):
    x = problem(fp8=True, whole=False)
    assert near(in_float64(x), in_float64(x)) and not near(LOGIT_MUTANTS[mutant](x), in_float64(x))


def given(x: dict[str, Any]) -> list[Any]:
    return [x[name] for name in ("q", "weights", "pool", "pages", "lengths")]


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_logits_are_sums_over_index_heads(fp8):
    x = problem(fp8, whole=False)
    seen = np.arange(48) < x["lengths"][:, None]
    got = np.asarray(jax.jit(partial(triton.logits, config=LOGITS, interpret=True))(*given(x)))
    assert near(np.where(seen, got, 0), in_float64(x))
    assert near(np.asarray(jax.jit(ref.logits)(*given(x))), in_float64(x))


@pytest.mark.parametrize("products", [True, False], ids=["products in fp8", "products in float16"])
def test_keys_of_fp8_are_chosen_exactly(products):
    """Whole numbers, so that nothing depends on the order of a sum: tied logits, poison behind every length, k = 12."""
    x = problem(fp8=True, whole=True)
    config = TritonConfig(
        logits=LogitsConfig(block_tokens=16, blocks=2, rows=2, warps=4, stages=2, fp8_products=products), select=CHUNKS
    )
    got = jax.jit(partial(indexer_topk, k=12, backend="triton", config=config, interpret=True))(*given(x))
    logits = in_float64(x)
    assert len(np.unique(logits[0, :44])) < 40, "no ties"
    assert np.asarray(got).tolist() == [best(row, n, 12) for row, n in zip(logits, x["lengths"], strict=True)]


def test_the_reference_chooses_where_there_is_no_gpu():
    x = problem(fp8=False, whole=True)
    got = np.asarray(jax.jit(partial(indexer_topk, k=12))(*given(x)))
    assert got.tolist() == [best(row, n, 12) for row, n in zip(in_float64(x), x["lengths"], strict=True)]


def test_a_scale_passes_the_relu():
    """Queries are quantized head by head; what is undone in the weights is what was divided out."""
    q = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 128)), jnp.bfloat16)
    q8, weights = quantize_queries(q, jnp.ones((3, 2), jnp.float32))
    assert (q8.dtype, weights.dtype) == (jnp.float8_e4m3fn, jnp.float32)
    back = q8.astype(jnp.float32) * weights[..., None]
    np.testing.assert_allclose(back, q.astype(jnp.float32), rtol=2**-4, atol=1e-4)


def arguments(**changes: Any) -> dict[str, Any]:
    sizes = {"q": (4, 2, 128), "weights": (4, 2), "pool": (5, 4, 128), "pages": (2, 3), "lengths": (4,)} | changes
    dtypes = {"weights": jnp.float32, "pages": jnp.int32, "lengths": jnp.int32}
    return {name: jnp.zeros(size, dtypes.get(name, jnp.bfloat16)) for name, size in sizes.items()}


BY_TRITON = {"backend": "triton", "chip": "h200"}


@pytest.mark.parametrize(
    ("changes", "options", "error", "words"),
    [
        (
            {"pool": (5, 4, 96)},
            {},
            ValueError,
            "heads of 128 columns need bfloat16 keys of 128, but the pool's have 96",
        ),
        ({"weights": (4, 3)}, {}, ValueError, r"4 rows of 2 heads, but weights \(4, 3\) and lengths \(4,\)"),
        ({"pages": (3, 3)}, {}, ValueError, "4 query rows are no equal shares of 3 sequences"),
        ({}, {"k": 0}, ValueError, "the indexer selects k = 0 tokens: give at least 1"),
        ({}, {"backend": "sort"}, ValueError, "indexer_topk has no backend 'sort'; it has: triton, ref"),
        ({}, {"backend": "triton"}, ValueError, r"triton needs to know its GPU: name a chip"),
        ({"q": (4, 2, 96), "pool": (5, 4, 96)}, BY_TRITON, NotImplementedError, "the index heads' width is 96"),
    ],
)
def test_what_cannot_be_is_refused(changes, options, error, words):
    with pytest.raises(error, match=words):
        indexer_topk(**arguments(**changes), **{"k": 4} | options)


def test_what_the_kernels_do_not_take_is_refused():
    wide = arguments(q=(4, 2, 256)) | {"pool": jnp.zeros((5, 4, 264), jnp.uint8)}
    with pytest.raises(NotImplementedError, match="FP8 keys with one scale are 128 wide, not 256"):
        indexer_topk(**wide, k=4, **BY_TRITON)
    mixed = arguments() | {"pool": jnp.zeros((5, 4, 132), jnp.uint8)}
    with pytest.raises(NotImplementedError, match="bfloat16 queries with FP8 keys: store both alike"):
        indexer_topk(**mixed, k=4, **BY_TRITON)
    floats = {name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for name, x in arguments().items()}
    with pytest.raises(NotImplementedError, match="float32 keys do not fit in shared memory"):
        indexer_topk(**floats, k=4, **BY_TRITON)
    for taken in (floats, mixed, wide):  # by the reference
        assert jax.eval_shape(partial(indexer_topk, k=4, chip="h200"), **taken).shape == (4, 4)


def test_selections_that_cannot_be_are_refused():
    x, n = jnp.zeros((2, 9)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"k = 0 of float32\[2, 9\] with lengths \[2\]: give k >= 1"):
        top_k(x, n, k=0)
    with pytest.raises(ValueError, match="top_k has no backend 'sort'; it has: triton, ref"):
        top_k(x, n, k=2, backend="sort")
    with pytest.raises(ValueError, match="triton needs a SelectConfig: give config="):
        top_k(x, n, k=2, backend="triton")
    with pytest.raises(NotImplementedError, match="a block is a power of two of at most 16384 elements, not 48"):
        top_k(x, n, k=2, backend="triton", config=SelectConfig(block=48, chunk=64, warps=4))
