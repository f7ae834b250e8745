"""What Mosaic GPU calls differently from one JAX to the next, and what its interpret mode cannot do.

Interpret mode knows no register layouts, no run_state and no wgmma on registers: three functions stand in for them
there.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import GROUP, is_fp8

TOKENS = 64  # of a block
COLUMNS = 64  # of BF16 that a row of a 128-byte swizzle holds
INTERPRETED_FROM = (0, 12)  # JAX; 0.10 has no interpreter, and 0.11's wants every waiter to see a barrier's last phase


def interpret_params(interpret: bool, **options: Any) -> Any:
    """What `plgpu.kernel` takes as `interpret`, with these options. Refuses interpret mode where this JAX has none."""
    if not interpret:
        return None
    if jax.__version_info__ < INTERPRETED_FROM:
        raise NotImplementedError(
            f"Mosaic GPU's interpret mode needs JAX 0.12 or newer, and this is {jax.__version__}."
        )
    return vars(plgpu)["InterpretGPUParams"](**options)


def in_turn(turns: Any, items: Any, held: Any, worker: jax.Array, body: Callable[..., None]) -> None:
    """The items of a persistent program, as each of its warpgroups goes through them: what they share, ptxas spills.

    Calls `body(item, row, begin, end, length, nth0)` for each: blocks begin to end of the row's `length` tokens, after
    nth0 blocks that the program has had.
    """

    def turn(item: jax.Array, nth0: jax.Array) -> jax.Array:
        row, begin, end = (items[item, i] for i in range(3))
        body(item, row, begin, end, held[row], nth0)
        return nth0 + end - begin

    lax.fori_loop(turns[worker], turns[worker + 1], turn, jnp.int32(0))


def refuse_rows(kernel: str, pool: jax.Array, value_width: int) -> None:
    """Refuse rows that are neither BF16 nor FP8, and FP8 rows of which a half is no whole number of groups."""
    if not is_fp8(pool) and pool.dtype != jnp.bfloat16:
        told = f"the {kernel} kernel reads BF16 and FP8 rows, not {pool.dtype}: give one of the two."
        raise NotImplementedError(told)
    if is_fp8(pool) and value_width % (2 * GROUP):
        raise NotImplementedError(
            f"the {kernel} kernel keeps halves of whole groups of {GROUP} columns, which share a scale: FP8 rows of a "
            f"latent width in steps of {2 * GROUP}, not {value_width}."
        )


def refuse_pages(page_size: int) -> None:
    """Refuse pages that a block of TOKENS is not made of, or no part of, in whole rows of a swizzle."""
    if page_size % TOKENS and (TOKENS % page_size or page_size % 8):
        raise NotImplementedError(
            f"TMA copies blocks of {TOKENS} tokens: pages of 8, 16, 32 or multiples of {TOKENS}, not {page_size}."
        )


def runs(
    pages: Any, row: jax.Array, length: jax.Array, block: jax.Array, page_size: int
) -> list[tuple[jax.Array, Any, Any]]:
    """Page, slots, and tokens of the block, of what one TMA copy takes; a page without tokens is never read."""
    together, found = min(page_size, TOKENS), []
    for first in range(0, TOKENS, together):
        token = jnp.minimum(block * TOKENS + first, length - 1)
        page, inside = pages[row, lax.div(token, page_size)], lax.rem(block * TOKENS + first, page_size)
        found.append((page, pl.ds(inside if page_size > together else 0, together), pl.ds(first, together)))
    return found


def turned(ref: Any) -> Any:
    """[a, b] seen as [b, a]; JAX 0.10 has a function for it, 0.12 a method."""
    return ref.transpose((1, 0)) if jax.__version_info__ >= (0, 11) else plgpu.transpose_ref(ref, (1, 0))


def load(ref: Any, layout: Any) -> jax.Array:
    """What `ref` holds, in the registers of `layout`, however many accesses that takes."""
    index = () if jax.__version_info__ >= (0, 11) else ((),)
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def laid(x: jax.Array, layout: Any, interpreted: bool) -> jax.Array:
    """`x` in the registers of `layout`."""
    return x if interpreted else plgpu.layout_cast(x, layout)


def count(shape: tuple[int, int], axis: int, interpreted: bool) -> jax.Array:
    """i32[shape]: the index along `axis`, laid out as a wgmma's accumulator."""
    if interpreted:
        return lax.broadcasted_iota(jnp.int32, shape, axis)
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def add_product(acc: jax.Array, p: Any, values: Any, interpreted: bool) -> jax.Array:
    """acc + p @ values by a wgmma that keeps the accumulator in its registers; `p` in registers or shared memory."""
    if interpreted and isinstance(p, jax.Array):
        acc = acc + jnp.dot(p, values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # wgmma reads as TMA writes, by the async proxy; what stands in for it does not
        return acc
    if interpreted:
        sums: Any = plgpu.WGMMAAccumulatorRef((acc.shape[0], acc.shape[1]), jnp.float32)
        return acc + pl.run_scoped(lambda ref: [plgpu.wgmma(ref, p, values), ref[...]][1], sums)
    accumulate: Any = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p, values))
    return accumulate(plgpu.WGMMAAccumulatorRef.init(acc))


def zero_rows(rows: Any, first: jax.Array, width: int, interpreted: bool) -> None:
    """Zeros in the tokens of a block in shared memory from `first` on: there may be NaN, and 0 times NaN is one.

    Takes `width` columns at a time, to keep out of an accumulator's registers.
    """
    which = count((rows.shape[0], width), 0, interpreted)
    for column in range(0, rows.shape[1], width):
        own = rows.at[:, pl.ds(column, width)]
        values = own[...]
        own[...] = jnp.where(which < first, values, jnp.zeros_like(values))


def masked_logits(q: Any, keys: Any, seen: jax.Array, interpreted: bool) -> jax.Array:
    """f32[heads, tokens] of the queries' and keys' parts in shared memory; -inf from token `seen` on."""
    shape = q[0].shape[0], keys[0].shape[0]

    def products(logits_ref: Any) -> jax.Array:
        for mine, theirs in zip(q, keys, strict=True):
            plgpu.wgmma(logits_ref, mine, turned(theirs))
        return logits_ref[...]

    logits = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    return jnp.where(count(shape, 1, interpreted) < seen, logits, -jnp.inf)


over = functools.partial(lax.broadcast_in_dim, broadcast_dimensions=(0,))
