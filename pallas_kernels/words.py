"""Arrays as lines of machine words, for kernels that only move bytes."""

import math

import jax
import jax.numpy as jnp

WORDS = {4: jnp.uint32, 2: jnp.uint16, 1: jnp.uint8}  # bytes: the widest that divides a line is taken


def as_lines(x: jax.Array, *, lead: int = 1) -> jax.Array:
    """[n..., ...] as unsigned words [n..., words], with `lead` dimensions in front. XLA moves no byte for it."""
    flat = x.reshape(*x.shape[:lead], -1)
    line = flat.shape[-1] * x.dtype.itemsize
    size = next(size for size in WORDS if line % size == 0)
    if size <= x.dtype.itemsize:  # a wide element is several words
        size = min(size, x.dtype.itemsize)
        return jax.lax.bitcast_convert_type(flat, WORDS[size]).reshape(*x.shape[:lead], -1)
    return jax.lax.bitcast_convert_type(flat.reshape(*x.shape[:lead], -1, size // x.dtype.itemsize), WORDS[size])


def from_lines(lines: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """The inverse of `as_lines`: words as elements of `dtype`, in `shape`."""
    size, width = lines.dtype.itemsize, jnp.dtype(dtype).itemsize
    if width > size:
        lines = lines.reshape(*lines.shape[:-1], -1, width // size)
    if math.prod(shape) * width != lines.size * size:
        raise ValueError(f"{lines.size * size} bytes are no array {shape} of {jnp.dtype(dtype).name}.")
    return jax.lax.bitcast_convert_type(lines, dtype).reshape(shape)
