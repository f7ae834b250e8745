"""What a program of the Blackwell kernel runs: one warpgroup copies, one multiplies, one takes the softmax.

See `blackwell` for why they are cut so. A barrier is named for what has happened when it is passed.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import Fp8Views
from pallas_kernels.mla_decode.blackwell_fp8 import convert
from pallas_kernels.mla_decode.mosaic import COLUMNS, TOKENS, in_turn, load, over, runs

LOG2E = math.log2(math.e)
HEADS = 128  # of a program: the lanes of tensor memory
HALVES = 2  # of the latent's columns, one a program
WARPGROUPS = 3
COPY, MULTIPLY, SOFTMAX = range(WARPGROUPS)
# Of a thread of each. A program starts with 168 for each of its 384 threads, so these may add up to 3 x 168: a
# warpgroup that asks for more than the others gave back would wait for ever.
REGISTERS = {"plain": (96, 96, 240), "fp8": (168, 96, 240)}


def attend(
    turns: Any, items: Any, pages: Any, held: Any, q: Any, *refs: Any, page_size: int, value_width: int,
    **scratch: Any,
) -> None:  # fmt: skip
    """One program of `blackwell._items`, which says what `scratch` is: HEADS heads of a worker's items.

    Args:
      refs: the pool, or the three views of one of FP8 rows; the outputs; the parts.
    """
    *pool, out, out_lse, part, part_lse = refs
    fp8 = len(pool) > 1
    registers = REGISTERS["fp8" if fp8 else "plain"]
    wg = lax.axis_index("wg")
    half = lax.rem(lax.axis_index("part"), HALVES)
    heads = pl.ds(lax.div(lax.axis_index("part"), HALVES) * HEADS, HEADS)
    kept = value_width // HALVES
    own = pl.ds(half * kept, kept)
    # The other half's columns and the rotary ones, in tiles.
    firsts: list[Any] = [(1 - half) * kept + first for first in range(0, kept, COLUMNS)]
    firsts += list(range(value_width, q.shape[2], COLUMNS))

    worker = lax.axis_index("worker")
    each = functools.partial(in_turn, turns, items, held, worker)

    @pl.when(wg == COPY)
    def _() -> None:
        plgpu.set_max_registers(registers[COPY], action="decrease")

        @each
        def _item(_: Any, row: Any, begin: Any, end: Any, length: Any, nth0: Any) -> None:
            @pl.when(end > begin)
            def _() -> None:
                pl.when(nth0 > 0)(lambda: plgpu.barrier_wait(scratch["q_done"]))
                plgpu.copy_gmem_to_smem(q.at[row, heads, own], scratch["q_kept"], scratch["q_copied"])

            if fp8:
                widths = {"page_size": page_size, "value_width": value_width, "rotary": q.shape[2] - value_width}
                convert(pages, Fp8Views(*pool), row, begin, end, length, nth0, half, **widths, **scratch)
            else:
                _copy(pages, pool[0], row, begin, end, length, nth0, own, firsts, page_size=page_size, **scratch)

    @pl.when(wg == MULTIPLY)
    def _() -> None:
        plgpu.set_max_registers(registers[MULTIPLY], action="decrease")

        @each
        def _item(_: Any, __: Any, begin: Any, end: Any, length: Any, nth0: Any) -> None:
            pl.when(end > begin)(lambda: _multiply(end - begin, nth0, length - begin * TOKENS, len(firsts), **scratch))

    @pl.when(wg == SOFTMAX)
    def _() -> None:
        plgpu.set_max_registers(registers[SOFTMAX], action="increase")

        def queries(item: jax.Array) -> None:
            @pl.when(item < turns[worker + 1])
            def _() -> None:
                row, begin, end = (items[item, i] for i in range(3))

                @pl.when(end > begin)
                def _() -> None:
                    for i, first in enumerate(firsts):
                        mine = load(q.at[row, heads, pl.ds(first, COLUMNS)], plgpu.Layout.TCGEN05)
                        plgpu.async_store_tmem(scratch["q_tiles"].at[:, pl.ds(i * COLUMNS, COLUMNS)], mine)
                    plgpu.commit_tmem()
                    plgpu.barrier_arrive(scratch["q_stored"])

        queries(turns[worker])

        @each
        def _item(item: Any, row: Any, begin: Any, end: Any, length: Any, nth0: Any) -> None:
            # The next item's logits are made beside the last values of this one, and while it is written.
            top, total = _softmax(begin, end, length, nth0, lambda: queries(item + 1), **scratch)
            row, alone = items[item, 0], items[item, 3]  # again, rather than kept in registers
            write = functools.partial(_write, top, total, half == 0, **scratch)
            pl.when(alone == 1)(lambda: write(out.at[row, heads, own], out_lse.at[row, heads]))
            pl.when(alone == 0)(lambda: write(part.at[item, heads, own], part_lse.at[item, heads]))


def _copy(
    pages: Any, pool: Any, row: jax.Array, begin: jax.Array, end: jax.Array, length: jax.Array, nth0: jax.Array,
    own: Any, firsts: list[Any], *, page_size: int, kept: Any, kept_here: Any, kept_done: Any, tiles: Any,
    tile_here: Any, tile_done: Any, **_: Any,
) -> None:  # fmt: skip
    """Blocks begin to end, in the order in which `_multiply` reads them."""

    @pl.loop(begin, end)
    def _block(block: jax.Array) -> None:
        places = runs(pages, row, length, block, page_size)

        def fetch(nth: jax.Array, columns: Any, to: Any, here: Any, done: Any) -> None:
            slot = lax.rem(nth, to.shape[0])

            @pl.when(nth >= to.shape[0])
            def _() -> None:
                plgpu.barrier_wait(done.at[slot])

            for page, slots, tokens in places:
                plgpu.copy_gmem_to_smem(pool.at[page, slots, columns], to.at[slot, tokens], here.at[slot])

        nth = nth0 + block - begin
        fetch(nth, own, kept, kept_here, kept_done)
        for i, first in enumerate(firsts):
            fetch(nth * len(firsts) + i, pl.ds(first, COLUMNS), tiles, tile_here, tile_done)


def _multiply(
    blocks: jax.Array, nth0: jax.Array, tokens: jax.Array, count: int, *, q_kept: Any, q_tiles: Any, q_copied: Any,
    q_stored: Any, q_done: Any, kept: Any, kept_here: Any, kept_done: Any, last_here: Any, tiles: Any,
    tile_here: Any, tile_done: Any, logits: Any, logits_made: Any, logits_read: Any, chances: Any, chances_made: Any,
    acc: Any, values_added: Any, **_: Any,
) -> None:  # fmt: skip
    """Logits of block 0; then those of block i + 1 and the values of block i; then the last values.

    Args:
      nth0: blocks that the program had before.
      tokens: that exist from the first block on.
      count: tiles of a block.
    """
    plgpu.barrier_wait(q_copied)
    plgpu.barrier_wait(q_stored)

    def make_logits(i: jax.Array) -> None:
        nth = nth0 + i
        slot = lax.rem(nth, kept.shape[0])
        plgpu.barrier_wait(kept_here.at[slot])

        @pl.when(nth > 0)
        def _() -> None:
            plgpu.barrier_wait(logits_read)

        plgpu.tcgen05_mma(logits, q_kept, kept.at[slot].transpose((1, 0)), accumulate=False)
        for j in range(count):
            tile = lax.rem(nth * count + j, tiles.shape[0])
            plgpu.barrier_wait(tile_here.at[tile])
            mine = q_tiles.at[:, pl.ds(j * COLUMNS, COLUMNS)]
            plgpu.tcgen05_mma(logits, mine, tiles.at[tile].transpose((1, 0)), tile_done.at[tile])
        plgpu.tcgen05_commit_arrive(logits_made)
        pl.when(i == blocks - 1)(lambda: plgpu.tcgen05_commit_arrive(q_done))

    def add_values(i: jax.Array) -> None:
        slot = lax.rem(nth0 + i, kept.shape[0])
        plgpu.barrier_wait(chances_made)
        plgpu.tcgen05_mma(acc, chances, kept.at[slot], kept_done.at[slot], accumulate=i > 0)
        plgpu.tcgen05_commit_arrive(values_added)

    @pl.loop(0, blocks)
    def _block(i: jax.Array) -> None:
        make_logits(i)
        pl.when(i > 0)(lambda: add_values(i - 1))
        # Not before: of two such blocks the second would complete a phase that nobody has seen the end of.
        pl.when(i * TOKENS + TOKENS > tokens)(lambda: plgpu.barrier_arrive(last_here))

    add_values(blocks - 1)


def _softmax(
    begin: jax.Array, end: jax.Array, length: jax.Array, nth0: jax.Array, then: Callable[[], None], *, kept: Any,
    last_here: Any, logits: Any, logits_made: Any, logits_read: Any, chances: Any, chances_made: Any, acc: Any,
    values_added: Any, **_: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Probabilities of every block, and the accumulator rescaled. Calls `then` when the queries are done with. Returns
    the maximum of the logits, base 2, and the sum of the probabilities relative to it, f32[HEADS] each; all values are
    added when it returns.
    """
    width = kept.shape[2]

    def block(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        top, total = carry
        slot, left = lax.rem(nth0 + i - begin, kept.shape[0]), length - i * TOKENS
        plgpu.barrier_wait(logits_made)
        x = plgpu.async_load_tmem(logits) * LOG2E
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(logits_read)
        token = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=plgpu.Layout.TCGEN05)
        x = jnp.where(token < left, x, -jnp.inf)
        new_top = jnp.maximum(top, x.max(axis=1))
        scale = jnp.exp2(top - new_top)
        rise = (new_top - top).max()
        p = jnp.exp2(x - over(new_top, shape=x.shape))
        total = total * scale + p.sum(axis=1)

        @pl.when(left < TOKENS)
        def _() -> None:  # beyond the last token there may be NaN, and 0 times NaN is one
            plgpu.barrier_wait(last_here)
            which = plgpu.broadcasted_iota(jnp.int32, (TOKENS, COLUMNS), 0, layout=plgpu.Layout.WGMMA)
            for first in range(0, width, COLUMNS):
                own = kept.at[slot, :, pl.ds(first, COLUMNS)]
                values = own[...]
                own[...] = jnp.where(which < left, values, jnp.zeros_like(values))
            plgpu.commit_smem()

        @pl.when(i > begin)
        def _() -> None:
            plgpu.barrier_wait(values_added)

        plgpu.async_store_tmem(chances, p.astype(chances.dtype))

        @pl.when((i > begin) & (rise > 0))
        def _() -> None:
            for first in range(0, width, COLUMNS):
                mine = acc.at[:, pl.ds(first, COLUMNS)]
                sums = plgpu.async_load_tmem(mine)
                plgpu.wait_load_tmem()
                plgpu.async_store_tmem(mine, sums * over(scale, shape=sums.shape))

        plgpu.commit_tmem()
        plgpu.barrier_arrive(chances_made)
        return new_top, total

    laid = plgpu.Layout.TCGEN05.reduce(1)
    top = plgpu.layout_cast(jnp.full((HEADS,), -1e30, jnp.float32), laid)
    total = plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), laid)
    top, total = lax.fori_loop(begin, end, block, (top, total))
    then()

    @pl.when(end > begin)
    def _() -> None:
        plgpu.barrier_wait(values_added)

    return top, total


def _write(
    top: jax.Array, total: jax.Array, with_lse: jax.Array, to: Any, to_lse: Any, *, acc: Any, lse_smem: Any, **_: Any
) -> None:
    """The mean of the values to f32[HEADS, kept] of device memory, and the log-sum-exp, base e, to f32[HEADS]."""
    some = total != 0
    safe = jnp.where(some, total, jnp.ones_like(total))
    lse = jnp.where(some, top / LOG2E + jnp.log(safe), jnp.full_like(top, -jnp.inf))
    for first in range(0, acc.shape[1], COLUMNS):
        sums = plgpu.async_load_tmem(acc.at[:, pl.ds(first, COLUMNS)])
        mean = sums * over(1.0 / safe, shape=sums.shape)
        # Of an item without a token the accumulator was never written.
        mean = jnp.where(over(some, shape=sums.shape), mean, jnp.zeros_like(mean))
        to[:, pl.ds(first, COLUMNS)] = mean
    plgpu.wait_load_tmem()  # the next item's values may come

    @pl.when(with_lse)
    def _() -> None:
        lse_smem[...] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lse_smem, to_lse)
        plgpu.wait_smem_to_gmem(0)
