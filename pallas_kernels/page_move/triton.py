"""Lines of words gathered and scattered by index, 16 bytes per access where lines are so aligned.

One program copies a stretch of one line, all of its loads in flight before the first store. Where a line is no multiple
of 16 bytes the compiler falls back to narrower accesses by itself: it sees the lines' stride.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.launch import triton_call

STRETCH = 2048  # words: 16 per thread


def gather(lines: jax.Array, slots: jax.Array, *, interpret: bool = False) -> jax.Array:
    """See `api.gather_pages`."""
    shape = (slots.shape[0], lines.shape[1])
    if not lines.shape[0]:
        return jnp.zeros(shape, lines.dtype)
    (taken,) = triton_call(
        functools.partial(_gather_kernel, stretch=_stretch(lines)),
        grid=(shape[0], pl.cdiv(shape[1], _stretch(lines))),
        out_shape=[jax.ShapeDtypeStruct(shape, lines.dtype)],
        warps=4,
        stages=1,
        interpret=interpret,
        name="page_gather",
    )(slots, lines)
    return taken


def scatter(lines: jax.Array, slots: jax.Array, source: jax.Array, *, interpret: bool = False) -> jax.Array:
    """See `api.scatter_pages`. In place where the caller donates `lines`."""
    if not lines.shape[0]:
        return lines
    (written,) = triton_call(
        functools.partial(_scatter_kernel, stretch=_stretch(lines)),
        grid=(slots.shape[0], pl.cdiv(lines.shape[1], _stretch(lines))),
        out_shape=[jax.ShapeDtypeStruct(lines.shape, lines.dtype)],
        aliases={2: 0},
        warps=4,
        stages=1,
        interpret=interpret,
        name="page_scatter",
    )(slots, source, lines)
    return written


def _stretch(lines: jax.Array) -> int:
    return min(STRETCH, 1 << (lines.shape[1] - 1).bit_length())


def _gather_kernel(slots: Any, lines: Any, out: Any, *, stretch: int) -> None:
    slot, inside, words, mine = _place(slots, lines, stretch)
    taken = pltriton.load(lines.at[slot, words], mask=mine & inside, other=jnp.zeros((), lines.dtype))
    pltriton.store(out.at[pl.program_id(0), words], taken, mask=mine)


def _scatter_kernel(slots: Any, source: Any, lines: Any, out: Any, *, stretch: int) -> None:
    slot, inside, words, mine = _place(slots, lines, stretch)
    taken = pltriton.load(source.at[pl.program_id(0), words], mask=mine & inside, other=jnp.zeros((), lines.dtype))
    pltriton.store(out.at[slot, words], taken, mask=mine & inside)


def _place(slots: Any, lines: Any, stretch: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """This program's slot (0 where there is none), whether there is one, its words, and which of them exist."""
    slot = slots[pl.program_id(0)]
    inside = (slot >= 0) & (slot < lines.shape[0])
    words = pl.program_id(1) * stretch + lax.broadcasted_iota(jnp.int32, (stretch,), 0)
    return jnp.where(inside, slot, 0), inside, words, words < lines.shape[1]
