"""The oracle: float32 logits of every token, then `jax.lax.top_k`, in plain jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels.formats import is_fp8, unpack_fp8

NO_SIGN, NOT_THERE = 2**31 - 1, -(2**31)


def choose(
    q: jax.Array, weights: jax.Array, pool: jax.Array, pages: jax.Array, lengths: jax.Array, *, k: int
) -> jax.Array:
    """See `api.indexer_topk`. Accepts every shape."""
    return top_k(logits(q, weights, pool, pages, lengths), lengths, k=k)


def logits(q: jax.Array, weights: jax.Array, pool: jax.Array, pages: jax.Array, lengths: jax.Array) -> jax.Array:
    """f32[R, W * K] of the first `lengths` tokens of each row; zero behind them, whatever lies there."""
    R, _, C = q.shape
    S = pages.shape[0]
    rows = pool[pages]
    rows = (unpack_fp8(rows.reshape(-1, 1, rows.shape[-1]), C) if is_fp8(pool) else rows).reshape(S, -1, C)
    seen_RN = jnp.arange(rows.shape[1])[None] < lengths[:, None]
    tile_SN = seen_RN.reshape(S, R // S, -1).any(1)
    k_SNC = jnp.where(tile_SN[..., None], rows, 0).astype(jnp.float32)
    q_STJC = q.astype(jnp.float32).reshape(S, R // S, *q.shape[1:])
    dots = jnp.einsum("stjc,snc->stjn", q_STJC, k_SNC, precision="highest").reshape(R, q.shape[1], -1)
    sums = jnp.einsum("rj,rjn->rn", weights, jnp.maximum(dots, 0), precision="highest")
    return jnp.where(seen_RN, sums, 0)


def top_k(logits: jax.Array, lengths: jax.Array, *, k: int) -> jax.Array:
    """See `api.top_k`."""
    N = logits.shape[1]
    column = jnp.arange(N, dtype=jnp.int32)[None]
    there_RN = (column < lengths[:, None]) & ~jnp.isnan(logits)
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.int32)  # -0.0 is no less than 0.0
    # Whole numbers in the floats' order: below that of -inf there is room for what is not there.
    image = jnp.where(there_RN, bits ^ ((bits >> 31) & NO_SIGN), NOT_THERE)
    _, found = jax.lax.top_k(jnp.pad(image, ((0, 0), (0, max(0, k - N))), constant_values=NOT_THERE), k)
    there = jnp.arange(k)[None] < jnp.minimum(there_RN.sum(1, dtype=jnp.int32), k)[:, None]
    ascending = jnp.sort(jnp.where(there, found.astype(jnp.int32), jnp.iinfo(jnp.int32).max), 1)
    return jnp.where(there, ascending, -1)
