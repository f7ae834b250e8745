"""Pack the parts of rows' heads into one message, in the order of places: one pass over the bytes.

One program copies a few heads of one place. Where widths are multiples of 16 bytes each access has 16; where not, the
compiler falls back to narrower ones by itself: it sees the strides.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.launch import triton_call

TILE = 4096  # words of the widest part that a program copies: 32 per thread


def pack(parts: tuple[jax.Array, ...], rows: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Words [S, h, sum of widths]: place s holds row rows[s] of all parts [N, h, width], side by side; 0 for no row."""
    heads, width = parts[0].shape[1], sum(part.shape[2] for part in parts)
    widest = max(_padded(part.shape[2]) for part in parts)
    tile = min(_padded(heads), max(1, TILE // widest))
    (packed,) = triton_call(
        functools.partial(_pack_kernel, tile=tile),
        grid=(rows.shape[0], pl.cdiv(heads, tile)),
        out_shape=[jax.ShapeDtypeStruct((rows.shape[0], heads, width), parts[0].dtype)],
        warps=4,
        stages=1,
        interpret=interpret,
        name="dop_pack",
    )(rows, *parts)
    return packed


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _pack_kernel(rows: Any, *refs: Any, tile: int) -> None:
    *parts, out = refs
    place = pl.program_id(0)
    row = rows[place]
    here = (row >= 0) & (row < parts[0].shape[0])
    source = jnp.where(here, row, 0)
    first = 0
    for part in parts:
        width = part.shape[2]
        shape = (tile, _padded(width))
        head = pl.program_id(1) * tile + lax.broadcasted_iota(jnp.int32, shape, 0)
        word = lax.broadcasted_iota(jnp.int32, shape, 1)
        mine = (head < part.shape[1]) & (word < width)
        taken = pltriton.load(part.at[source, head, word], mask=mine & here, other=jnp.zeros((), part.dtype))
        pltriton.store(out.at[place, head, first + word], taken, mask=mine)
        first += width
