"""From heads' own queries to those that meet latents, and from attention over latents to heads' own values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class HeadWeights(NamedTuple):
    """How every head's keys and values are made of latents. H heads, C latent, N unrotated key and V value columns."""

    w_uk: jax.Array  # [H, C, N]
    w_uv: jax.Array  # [H, V, C]


def absorb(q: jax.Array, w_uk: jax.Array) -> jax.Array:
    """[R, H, N + E] with [H, C, N] to absorbed queries [R, H, C + E]."""
    n = w_uk.shape[-1]
    return jnp.concatenate([by_head(q[..., :n], w_uk).astype(q.dtype), q[..., n:]], -1)


def unabsorb(out: jax.Array, w_uv: jax.Array) -> jax.Array:
    """Attention over latents f32[R, H, C] with [H, V, C] to f32[R, H, V]."""
    return by_head(out.astype(w_uv.dtype), w_uv)


def by_head(x: jax.Array, w: jax.Array) -> jax.Array:
    """[R, H, i] times [H, o, i], head by head: f32[R, H, o]."""
    return jnp.einsum("rhi,hoi->rho", x, w, preferred_element_type=jnp.float32)
