"""Merge partial attention: (output, log-sum-exp) pairs over disjoint sets of keys. Log-sum-exp is base e everywhere.

A part whose log-sum-exp is infinite saw no keys: it weighs nothing and its output is never read, so an empty part may
hold anything. The union of empty parts is (0, -inf). A NaN is no empty part: it stays a NaN, so that damage shows.
"""

import jax
import jax.numpy as jnp


def _weighted(out: jax.Array, lse: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array]:
    full = ~jnp.isinf(lse)
    weight = jnp.where(full, jnp.exp(jnp.where(full, lse - top, 0.0)), 0.0)
    return jnp.where(full[..., None], out, 0.0) * weight[..., None], weight


def _normalised(out: jax.Array, weight: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array]:
    some = weight != 0
    safe = jnp.where(some, weight, 1.0)
    return out / safe[..., None], jnp.where(some, top + jnp.log(safe), -jnp.inf)


def _top(lse: jax.Array) -> jax.Array:
    return jnp.where(jnp.isinf(lse), jnp.finfo(lse.dtype).min, lse)


def merge_over_axis(out: jax.Array, lse: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """Merge the parts that the ranks of `axis` hold. f32[..., D] and f32[...] on each; the union on all of them."""
    top = jax.lax.pmax(_top(lse), axis)
    out, weight = _weighted(out, lse, top)
    both = jax.lax.psum(jnp.concatenate([out, weight[..., None]], -1), axis)
    return _normalised(both[..., :-1], both[..., -1], top)


def scatter_over_axis(out: jax.Array, lse: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """Merge as `merge_over_axis` does and leave each rank its share of heads: f32[..., H, D] to f32[..., H / T, D]."""
    top = jax.lax.pmax(_top(lse), axis)
    out, weight = _weighted(out, lse, top)
    both = jnp.concatenate([out, weight[..., None]], -1)
    both = jax.lax.psum_scatter(both, axis, scatter_dimension=both.ndim - 2, tiled=True)
    heads = both.shape[-2]
    mine = jax.lax.dynamic_slice_in_dim(top, jax.lax.axis_index(axis) * heads, heads, top.ndim - 1)
    return _normalised(both[..., :-1], both[..., -1], mine)


def merge_parts(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge parts stacked on the leading dimension. f32[P, ..., D] and f32[P, ...] to f32[..., D] and f32[...]."""
    top = _top(lses).max(0)
    out, weight = _weighted(outs, lses, top[None])
    return _normalised(out.sum(0), weight.sum(0), top)
