"""The oracle: every key of every tile at once, in plain jnp."""

import jax
import jax.numpy as jnp


def attend(
    q: jax.Array, keys: jax.Array, values: jax.Array, pages: jax.Array, seen: jax.Array, *, tile: int
) -> tuple[jax.Array, jax.Array]:
    """See `api.gqa_attention`. Accepts every shape."""
    (R, H, D), G, T = q.shape, keys.shape[2], pages.shape[0]
    q_TQGND = q.astype(jnp.float32).reshape(T, tile, G, H // G, D)
    token = jnp.arange(pages.shape[1] * keys.shape[1], dtype=jnp.int32)[None, None]
    visible_TQX = token < seen.reshape(T, tile, 1)
    held = visible_TQX.any(1)[..., None, None]
    k_TXGD, v_TXGV = (
        jnp.where(held, pool[pages].reshape(T, -1, *pool.shape[2:]), 0).astype(jnp.float32) for pool in (keys, values)
    )
    scores = jnp.einsum("tqgnd,txgd->tqgnx", q_TQGND, k_TXGD, precision="highest")
    scores = jnp.where(visible_TQX[:, :, None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    weights = jnp.exp(scores - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None])
    out = jnp.einsum("tqgnx,txgv->tqgnv", weights, v_TXGV, precision="highest")
    return out.reshape(R, H, -1), lse.reshape(R, H)
