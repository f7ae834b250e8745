"""Arrays as lines of machine words, for kernels that only move bytes."""

import math

import jax
import jax.numpy as jnp

WORDS = {4: jnp.uint32, 2: jnp.uint16, 1: jnp.uint8}  # bytes: the widest that divides a line is taken


def word_bytes(*line_bytes: int) -> int:
    """Bytes of the widest word that divides lines of all these bytes."""
    return next(size for size in WORDS if all(line % size == 0 for line in line_bytes))


def as_lines(x: jax.Array, *, lead: int = 1, word: int = 0) -> jax.Array:
    """[n..., ...] as unsigned words [n..., words], with `lead` dimensions in front. XLA moves no byte for it.

    `word` is their size in bytes; 0 takes the widest that divides a line.
    """
    front, width = x.shape[:lead], math.prod(x.shape[lead:])
    size = word or word_bytes(width * x.dtype.itemsize)
    words = width * x.dtype.itemsize // size
    if size <= x.dtype.itemsize:  # a wide element is several words
        return jax.lax.bitcast_convert_type(x.reshape(*front, width), WORDS[size]).reshape(*front, words)
    return jax.lax.bitcast_convert_type(x.reshape(*front, words, size // x.dtype.itemsize), WORDS[size])


def from_lines(lines: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """The inverse of `as_lines`: words as elements of `dtype`, in `shape`."""
    size, width = lines.dtype.itemsize, jnp.dtype(dtype).itemsize
    if width > size:
        lines = lines.reshape(*lines.shape[:-1], lines.shape[-1] * size // width, width // size)
    if math.prod(shape) * width != lines.size * size:
        raise ValueError(f"{lines.size * size} bytes are no array {shape} of {jnp.dtype(dtype).name}.")
    return jax.lax.bitcast_convert_type(lines, dtype).reshape(shape)
