"""Routed experts with sigmoid scores, selection bias and group limit (DeepSeek-V3, "noaux_tc").

Routing is replicated: every rank sees every row and runs the experts it holds.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from splash_jax.models.config import ModelConfig
from splash_jax.models.math import dot

FEW_ROWS = 8  # up to here an expert runs on every row: cheaper than picking out those that chose it


def route(cfg: ModelConfig, router: jax.Array, bias: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Experts of every row: ids i32[N, k] and combine weights f32[N, k], routed scaling applied here and nowhere else.

    The bias chooses and does not weigh; everything is float32 whatever the type of x [N, d].
    """
    scores = jax.nn.sigmoid(jnp.matmul(x.astype(jnp.float32), router.T, precision="highest"))
    biased = scores + bias[None]
    if cfg.n_group > 1:
        grouped = biased.reshape(-1, cfg.n_group, cfg.num_experts // cfg.n_group)
        best = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        _, kept = jax.lax.top_k(best, cfg.topk_group)
        open_NG = jax.nn.one_hot(kept, cfg.n_group, dtype=jnp.int32).sum(1) > 0
        # An expert of an open group is never -inf itself: it would tie with those of the others.
        least = jnp.finfo(jnp.float32).min
        biased = jnp.where(open_NG[..., None], jnp.maximum(grouped, least), -jnp.inf).reshape(biased.shape)
    _, ids = jax.lax.top_k(biased, cfg.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, ids, 1)
    if cfg.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids, weights * cfg.routed_scaling_factor


def tile_rows(rows: int, per_token: int, experts: int) -> int:
    """Rows that one read of an expert's weights serves: about twice its even share, so that most need one."""
    share = max(FEW_ROWS, 2 * rows * per_token // experts)
    return min(64, 1 << (share - 1).bit_length())


def run_experts(cfg: ModelConfig, moe: Mapping[str, Any], x: jax.Array, valid: jax.Array, rank: jax.Array) -> jax.Array:
    """Weighted sum of this rank's experts for rows x [N, d]; rows where not `valid` bool[N] are left at zero.

    Exact for every routing, however uneven. An expert nobody chose costs nothing. No collective inside, so ranks may
    do different amounts of work.
    """
    ids, weights = route(cfg, moe["router"], moe["router_bias"], x)
    experts = moe["experts"]
    here = ids - (rank * len(experts)).astype(ids.dtype)
    here = jnp.where(valid[:, None] & (here >= 0) & (here < len(experts)), here, len(experts))
    m = tile_rows(x.shape[0], ids.shape[1], cfg.num_experts)
    choices = None if x.shape[0] <= FEW_ROWS else _by_expert(here, weights, len(experts), m)
    total = jnp.zeros(x.shape, jnp.float32)
    for slot, expert in enumerate(experts):
        w = expert["gate_up"][0], expert["down"][0]
        if choices is None:
            total = _all_rows(*w, x, jnp.where(here == slot, weights, 0.0).sum(-1), (here == slot).any(), total)
        else:
            total = _chosen_rows(*w, x, choices, slot, m, total)
    return total.astype(x.dtype)


class Choices(NamedTuple):
    """Who chose which of a rank's E experts, by expert: slot s has those from first[s] to first[s + 1].

    There are C = N k choices, those of other ranks' experts last, and then padding: a tile of m rows from any choice
    stays inside.
    """

    rows: jax.Array  # i32[C + m]
    weights: jax.Array  # f32[C + m]
    first: jax.Array  # i32[E + 1]


def _by_expert(slots: jax.Array, weights: jax.Array, experts: int, spare: int) -> Choices:
    """The choices slots i32[N, k] of this rank's `experts`, sorted; a slot is `experts` where the expert is another
    rank's or the row padding. `spare`: rows of a tile.
    """
    flat = slots.ravel()
    order = jnp.argsort(flat, stable=True)
    counts = (flat[None] == jnp.arange(experts, dtype=flat.dtype)[:, None]).sum(1, dtype=jnp.int32)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    rows = (order // slots.shape[1]).astype(jnp.int32)
    return Choices(jnp.pad(rows, (0, spare)), jnp.pad(weights.ravel()[order], (0, spare)), first)


def _weighted(gate_up: jax.Array, down: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
    """One expert on rows [M, d], times weight f32[M]; exactly zero where the weight is."""
    both = dot(x, gate_up)
    f = both.shape[-1] // 2
    out = dot(jax.nn.silu(both[:, :f]) * both[:, f:], down).astype(jnp.float32)
    return jnp.where((weight > 0)[:, None], out * weight[:, None], 0.0)


def _all_rows(
    gate_up: jax.Array, down: jax.Array, x: jax.Array, weight: jax.Array, chosen: jax.Array, total: jax.Array
) -> jax.Array:
    """Add one expert's part to `total`, run on every row if any row chose it."""
    add = lambda: total + _weighted(gate_up, down, x, weight)  # noqa: E731
    return jax.lax.cond(chosen, add, lambda: total)


def _chosen_rows(
    gate_up: jax.Array, down: jax.Array, x: jax.Array, choices: Choices, slot: int, m: int, total: jax.Array
) -> jax.Array:
    """Add one expert's part to `total`, run on the rows that chose it, `m` at a time."""
    begin, end = choices.first[slot], choices.first[slot + 1]

    def tile(t: jax.Array, total: jax.Array) -> jax.Array:
        at = begin + t * m
        inside = at + jnp.arange(m, dtype=jnp.int32) < end
        rows = jnp.where(inside, jax.lax.dynamic_slice_in_dim(choices.rows, at, m), len(x))
        weight = jnp.where(inside, jax.lax.dynamic_slice_in_dim(choices.weights, at, m), 0.0)
        part = _weighted(gate_up, down, x.at[rows].get(mode="fill", fill_value=0), weight)
        return total.at[rows].add(part, mode="drop")

    return jax.lax.fori_loop(0, (end - begin + m - 1) // m, tile, total)
