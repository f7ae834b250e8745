"""Routed experts with sigmoid scores, selection bias and group limit (DeepSeek-V3, "noaux_tc").

Routing is replicated: every rank sees every row and runs the experts it holds.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from splash_jax.models.config import ModelConfig
from splash_jax.models.math import dot


def route(cfg: ModelConfig, router: jax.Array, bias: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Experts of every row: ids i32[N, k] and combine weights f32[N, k], routed scaling applied here and nowhere else.

    The bias chooses and does not weigh; everything is float32 whatever the type of x [N, d].
    """
    scores = jax.nn.sigmoid(jnp.matmul(x.astype(jnp.float32), router, precision="highest"))
    biased = scores + bias[None]
    if cfg.n_group > 1:
        grouped = biased.reshape(-1, cfg.n_group, cfg.num_experts // cfg.n_group)
        best = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        _, kept = jax.lax.top_k(best, cfg.topk_group)
        open_NG = jax.nn.one_hot(kept, cfg.n_group, dtype=jnp.int32).sum(1) > 0
        biased = jnp.where(open_NG[..., None], grouped, -jnp.inf).reshape(biased.shape)
    _, ids = jax.lax.top_k(biased, cfg.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, ids, 1)
    if cfg.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids, weights * cfg.routed_scaling_factor


def tile_rows(rows: int, per_token: int, experts: int) -> int:
    """Rows per tile of `run_experts`: about twice an expert's even share, so that most experts take one tile."""
    share = max(1, 2 * rows * per_token // experts)
    return min(64, 1 << (share - 1).bit_length())


def run_experts(
    cfg: ModelConfig, moe: Mapping[str, jax.Array], x: jax.Array, valid: jax.Array, rank: jax.Array
) -> jax.Array:
    """Weighted sum of this rank's experts for rows x [N, d]; rows where not `valid` bool[N] are left at zero.

    Exact for every routing, however uneven: rows are sorted by expert and cut into tiles, and the loop runs over the
    tiles there are. No collective inside, so ranks may run different numbers of tiles.
    """
    ids, weights = route(cfg, moe["router"], moe["router_bias"], x)
    gate_up, down = moe["gate_up"], moe["down"]
    here, k = gate_up.shape[0], cfg.num_experts_per_tok
    local = ids - (rank * here).astype(ids.dtype)
    local = jnp.where(valid[:, None] & (local >= 0) & (local < here), local, here).reshape(-1)
    order = jnp.argsort(local, stable=True)
    count = jnp.zeros((here + 1,), jnp.int32).at[local].add(1)[:here]
    start = jnp.cumsum(count) - count
    m = tile_rows(x.shape[0], k, cfg.num_experts)
    last_tile = jnp.cumsum((count + (m - 1)) // m)
    flat_weights = weights.reshape(-1)

    def tile(t: jax.Array, total: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last_tile, t, side="right").astype(jnp.int32)
        first_tile = jnp.where(expert > 0, last_tile[expert - 1], 0)
        place = (t - first_tile) * m + jnp.arange(m, dtype=jnp.int32)
        real = place < count[expert]
        chosen = order[jnp.minimum(start[expert] + place, order.shape[0] - 1)]
        rows = jnp.where(real, chosen // k, x.shape[0])
        h = x.at[rows].get(mode="fill", fill_value=0)
        both = dot(h, jax.lax.dynamic_index_in_dim(gate_up, expert, 0, keepdims=False))
        f = both.shape[-1] // 2
        out = dot(
            jax.nn.silu(both[:, :f]) * both[:, f:],
            jax.lax.dynamic_index_in_dim(down, expert, 0, keepdims=False),
        )
        weighted = out.astype(jnp.float32) * flat_weights[chosen][:, None]
        return total.at[rows].add(weighted, mode="drop")

    total = jax.lax.fori_loop(0, last_tile[-1], tile, jnp.zeros(x.shape, jnp.float32))
    return total.astype(x.dtype)
