"""Small pieces every layer uses. Sums and norms run in float32 whatever the serving type."""

from typing import Any

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """[..., d] normed in float32, in the type of x."""
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps)
    return (h * jnp.expand_dims(weight.astype(jnp.float32), range(h.ndim - 1))).astype(x.dtype)


def dot(x: jax.Array, w: jax.Array, dtype: Any = None) -> jax.Array:
    """[..., i] times w [o, i], summed in float32; in `dtype`, or else the type of x.

    Computed as w x^T: on CPU that is about twice as fast as x w^T for a few rows. The barrier keeps XLA from turning it
    round again.
    """
    flat = x.reshape(-1, x.shape[-1])
    out = jax.lax.dot_general(w, flat, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    out = jax.lax.optimization_barrier(out).T
    return out.astype(dtype or x.dtype).reshape(*x.shape[:-1], w.shape[0])


def dot_heads(x: jax.Array, w: jax.Array) -> jax.Array:
    """[..., H, i] times w [H, o, i], head by head: [..., H, o]; summed in float32, in the type of x."""
    flat = x.reshape(-1, *x.shape[-2:])
    out = jax.lax.dot_general(w, flat, (((2,), (2,)), ((0,), (1,))), preferred_element_type=jnp.float32)
    out = jax.lax.optimization_barrier(out).transpose(2, 0, 1)
    return out.astype(x.dtype).reshape(*x.shape[:-1], w.shape[1])


def add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + jnp.expand_dims(bias, range(x.ndim - 1))


def gated_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """silu(x W_gate) * (x W_up) W_down for x [N, d], gate_up [2, F, d] and down [d, F]; partial where F is cut."""
    width = gate_up.shape[1]
    both = dot(x, gate_up.reshape(2 * width, gate_up.shape[2]))
    return dot(jax.nn.silu(both[:, :width]) * both[:, width:], down)
