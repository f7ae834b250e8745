"""Attention through every layout is dense attention: all roles on one axis, and all pairs of roles on two."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from splash_jax.layouts import ROLES, Exchange, attention_mesh, local_spec, make_layout, row_spec, weight_spec
from splash_jax.layouts.cp import ContextParallel
from splash_jax.layouts.dcp import DecodeContextParallel
from splash_jax.layouts.merge import scatter_over_axis
from splash_jax.layouts.rep import Replicated
from splash_jax.ownership import KVShape, Layout

N, D, H, K, LENGTH = 8, 6, 8, 4, 13  # rows, hidden, heads, head width, longest history
KV = KVShape(page_size=4, interleave=2, bytes_per_token=1)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, D)).astype(np.float32)
W_Q = RNG.normal(size=(D, H, K)).astype(np.float32)
W_O = RNG.normal(size=(H, K, D)).astype(np.float32)
KEYS = RNG.normal(size=(N, LENGTH, K)).astype(np.float32)
POSITIONS = np.asarray([0, 1, 2, 12, 5, 7, 3, 9], np.int32)  # a row sees keys 0 .. its position
PARTS = RNG.normal(size=(8,)).astype(np.float32)  # a dense layer cut over ranks: each multiplies by its part


def reference(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Attention, then the stand-in for a dense layer, in float64."""
    q = np.einsum("nd,dhk->nhk", X, W_Q, dtype=np.float64)
    scores = np.einsum("nhk,nsk->nhs", q, KEYS.astype(np.float64))
    scores = np.where(np.arange(LENGTH) <= POSITIONS[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = np.einsum("nhk,hkd->nd", np.einsum("nhs,nsk->nhk", weights, KEYS.astype(np.float64)), W_O)
    return attended, attended * PARTS[: layout.size].sum(dtype=np.float64)


def histories(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """What each rank holds: keys f32[T, R, LENGTH, K] of its owner's rows, NaN where it holds none; their positions."""
    rows = N // layout.owner_groups
    keys = np.full((layout.size, rows, LENGTH, K), np.nan, np.float32)
    at = np.full((layout.size, rows, LENGTH), 10**6, np.int32)
    for row in range(N):
        group, index = divmod(row, rows)
        ranks = [rank for rank in range(layout.size) if layout.group_of(rank) == group]
        home = ranks[row % len(ranks)]  # positions may begin on any rank of the owner
        for rank in layout.holders(home):
            lag = layout.lag(home, rank)
            held = KV.tokens_held(layout, lag, POSITIONS[row] + 1)
            positions = KV.positions(layout, lag, np.arange(held))
            keys[rank, index, :held], at[rank, index, :held] = KEYS[row, positions], positions
    return keys, at


def run(layout: Layout, mesh_shape: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    exchange = Exchange(layout)
    groups = tuple(axis.size for axis in layout.axes if axis.name in layout.owner_axes)

    def step(x, positions, w_q, w_o, keys, at, parts):
        own_positions = exchange.own_rows(exchange.carried_rows(positions))

        def kernel(q):
            visible = at[0] <= own_positions[:, None]
            held = jnp.where(visible[..., None], keys[0], 0)
            scores = jnp.where(visible[:, None], jnp.einsum("rhk,rsk->rhs", q, held), -jnp.inf)
            lse = jax.nn.logsumexp(scores, -1)
            some = jnp.isfinite(lse)[..., None]
            weights = jnp.where(some, jnp.exp(scores - jnp.where(some, lse[..., None], 0)), 0)
            out = jnp.einsum("rhs,rsk->rhk", weights, held)
            return jnp.where(some, out, jnp.nan), lse  # nobody may read an empty part

        q = jnp.einsum("...d,dhk->...hk", exchange.carried_rows(x), w_q)
        y = exchange.reduce_heads(jnp.einsum("...hk,hkd->...d", exchange.attend(q, kernel), w_o))
        every = exchange.gather_rows(y)
        return y, exchange.reduce_rows(every * parts[exchange.rank()])

    keys, at = histories(layout)
    spec, local = row_spec(layout), local_spec(layout)
    heads = (weight_spec(layout, (None, "heads", None)), weight_spec(layout, ("heads", None, None)))
    mapped = jax.shard_map(
        step,
        mesh=attention_mesh(mesh_shape),
        in_specs=(P(), P(), *heads, local, local, P()),
        out_specs=(spec, spec),
        check_vma=False,
    )
    shape = (*groups, N // layout.owner_groups)
    attended, dense = jax.jit(mapped)(X.reshape(*shape, D), POSITIONS.reshape(shape), W_Q, W_O, keys, at, PARTS)
    return np.asarray(attended).reshape(N, D), np.asarray(dense).reshape(N, D)


def check(roles: str | dict[str, str], mesh_shape: dict[str, int]) -> None:
    layout = make_layout(roles, mesh_shape)
    for got, wanted in zip(run(layout, mesh_shape), reference(layout), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-5)


SIZES = [pytest.param(n, marks=pytest.mark.slow) if n in (2, 8) else n for n in (1, 2, 4, 8)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_dense_attention(role, size):
    check(role, {"rank": size})


def pairs() -> list[object]:
    """Every pair of roles; by default every role twice on either axis."""
    cases = itertools.product(enumerate(ROLES), enumerate(ROLES))
    return [
        pytest.param((a, b), id=f"{a}-{b}", marks=() if (i + j) % 3 == 0 else pytest.mark.slow)
        for (i, a), (j, b) in cases
    ]


@pytest.mark.parametrize("roles", pairs())
def test_a_pair_of_roles_is_dense_attention(roles):
    mesh_shape = {"node": 2, "chip": 2}
    check(dict(zip(mesh_shape, roles, strict=True)), mesh_shape)


@pytest.mark.slow
@pytest.mark.parametrize("roles", list(itertools.product(ROLES, repeat=2)), ids="-".join)
def test_a_pair_of_roles_on_uneven_axes(roles):
    mesh_shape = {"node": 2, "chip": 4}
    check(dict(zip(mesh_shape, roles, strict=True)), mesh_shape)


# Bugs that a role's exchange could have: each must show.
def test_the_tolerance_notices_heads_that_are_scattered_to_others(monkeypatch):
    def shifted(self, out, lse, axis):
        out, lse = scatter_over_axis(out, lse, axis)
        return jax.lax.ppermute(out, axis, [(i, (i + 1) % 4) for i in range(4)]), lse

    monkeypatch.setattr(DecodeContextParallel, "merge", shifted)
    with pytest.raises(AssertionError):
        check("dcp", {"rank": 4})


def test_the_tolerance_notices_rows_that_are_summed_over_too_many_ranks(monkeypatch):
    monkeypatch.setattr(Replicated, "scatter_rows", lambda self, y, axis, dim: jax.lax.psum(y, axis))
    with pytest.raises(AssertionError):
        check("rep", {"rank": 4})


def test_the_tolerance_notices_a_role_that_does_not_merge(monkeypatch):
    monkeypatch.setattr(ContextParallel, "merge", lambda self, out, lse, axis: (out, lse))
    with pytest.raises(AssertionError):
        check("cp", {"rank": 4})
