"""Merging partial attention (scenario S03): it is one softmax over all keys, and an empty part never matters."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from splash_jax.layouts import attention_mesh
from splash_jax.layouts.merge import merge_over_axis, merge_parts

PARTS, ROWS, HEADS, WIDTH = 4, 3, 2, 5


def attend(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Softmax over keys in float64: scores [R, H, S], values [S, D] to [R, H, D] and log-sum-exp, base e."""
    if scores.shape[-1] == 0:
        return np.zeros((*scores.shape[:-1], values.shape[-1])), np.full(scores.shape[:-1], -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1)
    return np.einsum("rhs,sd->rhd", weights, values) / total[..., None], np.log(total) + top[..., 0]


def over_ranks(outs: np.ndarray, lses: np.ndarray) -> tuple[jax.Array, jax.Array]:
    def local(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        merged, total = merge_over_axis(out[0], lse[0], "rank")
        return merged[None], total[None]

    spec = P("rank")
    mesh = attention_mesh({"rank": PARTS})
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec), check_vma=False)
    merged, total = jax.jit(mapped)(outs, lses)
    for rank in range(1, PARTS):  # the union is the same on all of them
        np.testing.assert_array_equal(np.asarray(merged)[rank], np.asarray(merged)[0])
        np.testing.assert_array_equal(np.asarray(total)[rank], np.asarray(total)[0])
    return merged[0], total[0]


MERGES = pytest.mark.parametrize("merge", [jax.jit(merge_parts), over_ranks], ids=["stacked", "over ranks"])


def parts_of(counts: tuple[int, ...], shift: float = 0.0, garbage: float = 0.0, seed: int = 0):
    """(whole out, whole lse, outs, lses) of keys dealt into parts of the given sizes; empty outs hold `garbage`."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(0, 3, (ROWS, HEADS, sum(counts))) + shift
    values = rng.normal(size=(sum(counts), WIDTH))
    edges = np.cumsum((0, *counts))
    parts = [attend(scores[..., a:b], values[a:b]) for a, b in itertools.pairwise(edges)]
    outs = np.stack([out if n else np.full_like(out, garbage) for (out, _), n in zip(parts, counts, strict=True)])
    lses = np.stack([lse for _, lse in parts])
    return *attend(scores, values), outs.astype(np.float32), lses.astype(np.float32)


@MERGES
@pytest.mark.parametrize("garbage", [0.0, 7.0, np.inf, np.nan])
@pytest.mark.parametrize("counts", [(4, 1, 3, 9), (5, 0, 0, 2), (0, 0, 0, 6), (6, 0, 0, 0), (1, 1, 1, 1)])
def test_it_is_one_softmax(merge, counts, garbage):
    whole, whole_lse, outs, lses = parts_of(counts, garbage=garbage)
    out, lse = merge(outs, lses)
    np.testing.assert_allclose(out, whole, rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, rtol=0, atol=2e-6)


@MERGES
@pytest.mark.parametrize("garbage", [0.0, -3.0, np.inf, np.nan])
def test_the_union_of_empties_is_zero(merge, garbage):
    outs = np.full((PARTS, ROWS, HEADS, WIDTH), garbage, np.float32)
    out, lse = merge(outs, np.full((PARTS, ROWS, HEADS), -np.inf, np.float32))
    assert (np.asarray(out) == 0).all() and (np.asarray(lse) == -np.inf).all()


@MERGES
@pytest.mark.parametrize("shift", [-80.0, 80.0, -1e4, 1e4])
def test_large_log_sum_exps_neither_overflow_nor_vanish(merge, shift):
    whole, whole_lse, outs, lses = parts_of((4, 1, 0, 9), shift=shift)
    out, lse = merge(outs, lses)
    np.testing.assert_allclose(out, whole, rtol=0, atol=1e-6 + abs(shift) * 1e-6)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-6)


@MERGES
def test_a_part_of_infinite_weight_counts_as_empty(merge):
    """Some kernels give +inf for no keys: neither sign may reach a result."""
    whole, whole_lse, outs, lses = parts_of((4, 0, 0, 3), garbage=np.nan)
    lses[1] = np.inf
    out, lse = merge(outs, lses)
    np.testing.assert_allclose(out, whole, rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, rtol=0, atol=2e-6)


@MERGES
def test_parts_may_be_empty_for_some_rows_only(merge):
    whole, whole_lse, outs, lses = parts_of((4, 2, 3, 3))
    outs[1, 2], lses[1, 2] = np.nan, -np.inf
    out, lse = (np.asarray(x) for x in merge(outs, lses))
    np.testing.assert_allclose(out[:2], whole[:2], rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse[:2], whole_lse[:2], rtol=0, atol=2e-6)
    assert np.isfinite(out[2]).all() and (lse[2] < whole_lse[2]).all()


def test_the_base_is_e():
    """Two parts of one key each with score 0 hold log 2 together; base 2 would say 1."""
    out, lse = merge_parts(jnp.asarray([[[1.0]], [[3.0]]]), jnp.zeros((2, 1)))
    assert float(lse[0]) == pytest.approx(np.log(2.0))
    assert float(out[0, 0]) == pytest.approx(2.0)


def test_merging_is_associative_and_blind_to_order():
    _, _, outs, lses = parts_of((4, 0, 3, 9))
    merge = jax.jit(merge_parts)
    whole, whole_lse = merge(outs, lses)
    first, second = merge(outs[2:], lses[2:]), merge(outs[:2], lses[:2])
    nested = merge(jnp.stack([first[0], second[0]]), jnp.stack([first[1], second[1]]))
    np.testing.assert_allclose(nested[0], whole, rtol=0, atol=1e-6)
    np.testing.assert_allclose(nested[1], whole_lse, rtol=0, atol=2e-6)
