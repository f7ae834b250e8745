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
    out = _product(w, x.reshape(-1, x.shape[-1]), (((1,), (1,)), ((), ()))).T
    return out.astype(dtype or x.dtype).reshape(*x.shape[:-1], w.shape[0])


def dot_heads(x: jax.Array, w: jax.Array) -> jax.Array:
    """[..., H, i] times w [H, o, i], head by head: [..., H, o]; summed in float32, in the type of x."""
    out = _product(w, x.reshape(-1, *x.shape[-2:]), (((2,), (2,)), ((0,), (1,)))).transpose(2, 0, 1)
    return out.astype(x.dtype).reshape(*x.shape[:-1], w.shape[1])


def _product(w: jax.Array, rows: jax.Array, dims: Any) -> jax.Array:
    """f32[..., N] of rows [N, ...]. On CPU a single bfloat16 row goes in twice: XLA's product of a matrix and one such
    vector takes two to ten times as long as that of a matrix and two.
    """

    def product(w: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(jax.lax.dot_general(w, rows, dims, preferred_element_type=jnp.float32))

    def twice(w: jax.Array, rows: jax.Array) -> jax.Array:
        return product(w, jnp.concatenate([rows, rows]))[..., :1]

    if len(rows) > 1 or rows.dtype != jnp.bfloat16:
        return product(w, rows)
    return jax.lax.platform_dependent(w, rows, cpu=twice, default=product)


def add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + jnp.expand_dims(bias, range(x.ndim - 1))


def gated_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """silu(x W_gate) * (x W_up) W_down for x [N, d], gate_up [2, F, d] and down [d, F]; partial where F is cut."""
    width = gate_up.shape[1]
    both = dot(x, gate_up.reshape(2 * width, gate_up.shape[2]))
    return dot(jax.nn.silu(both[:, :width]) * both[:, width:], down)
