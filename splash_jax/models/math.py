"""Small pieces every layer uses. Sums and norms run in float32 whatever the serving type."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """[..., d] normed in float32, in the type of x."""
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps)
    return (h * jnp.expand_dims(weight.astype(jnp.float32), range(h.ndim - 1))).astype(x.dtype)


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """[..., i] times [i, o], summed in float32, in the type of x."""
    flat = x.reshape(-1, x.shape[-1])
    out = jnp.matmul(flat, w, preferred_element_type=jnp.float32)
    return out.astype(x.dtype).reshape(*x.shape[:-1], w.shape[-1])


def add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + jnp.expand_dims(bias, range(x.ndim - 1))


def gated_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """silu(x W_gate) * (x W_up) W_down for x [N, d], gate_up [d, 2, F] and down [F, d]; partial where F is cut."""
    width = gate_up.shape[-1]
    both = dot(x, gate_up.reshape(gate_up.shape[0], 2 * width))
    return dot(jax.nn.silu(both[:, :width]) * both[:, width:], down)
