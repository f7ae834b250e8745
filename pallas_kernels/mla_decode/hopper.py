"""Split-KV decode in Mosaic GPU for sm_90a: wgmma from shared memory that TMA fills, one warpgroup ahead of two.

A block of 64 heads meets 64 tokens at a time. Both computing warpgroups take all the logits, so that neither ever waits
for the other and one's softmax runs beside the other's products, and each keeps half of the output's latent columns:
the 512 float32 columns of 64 heads would not fit the registers of one. That costs 53 % more tensor-core work than
sharing the logits would, and saves every exchange between the two. The third warpgroup only issues copies.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode import hopper_fp8, triton
from pallas_kernels.mla_decode.formats import GROUP, is_fp8
from pallas_kernels.mla_decode.mosaic import (
    add_product,
    interpret_params,
    laid,
    masked_logits,
    over,
    refuse_pages,
    zero_rows,
)
from pallas_kernels.mla_decode.work import Work, split_work

LOG2E = math.log2(math.e)
HEADS = TOKENS = 64  # of a block: the rows of a wgmma, and what two stages leave room for
COLUMNS = 64  # of BF16 that a row of a 128-byte swizzle holds
WARPGROUPS = 2  # that compute
# Registers of a thread. A program starts with 168 for each of its 384, so a warpgroup that asks for more than the third
# one gave back would wait for ever: COPYING + 2 x COMPUTING must be no more than 3 x 168.
COPYING, COMPUTING = 24, 240


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HopperConfig:
    """One point of the tuning space."""

    stages: int  # blocks of tokens in shared memory
    workers: int  # programs of one head block that the chip holds at once
    overhead: int = 4  # what an item costs beside its blocks, in blocks

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return TOKENS

    def smem_bytes(self, columns: int, *, fp8: bool = False) -> int:
        """Shared memory of one program, for rows of so many BF16 columns; barriers left out.

        Of FP8 rows the same blocks are kept in BF16, and beside them the probabilities of one.
        """
        return 2 * columns * (HEADS + self.stages * TOKENS) + 4 * HEADS + (2 * HEADS * TOKENS if fp8 else 0)

    def plan(self, held: Any) -> Work:
        """See `TritonConfig.plan`."""
        return split_work(held, block=TOKENS, workers=self.workers, overhead=self.overhead)


def decode(
    q: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    held: jax.Array,
    *,
    value_width: int,
    config: HopperConfig,
    work: Work | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.mla_decode`. Refuses what wgmma and TMA cannot take, and interpret mode before JAX 0.11."""
    heads, columns = q.shape[1:]
    page_size, rotary = pool.shape[1], columns - value_width
    fp8 = is_fp8(pool)
    if not fp8 and pool.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the Hopper kernel reads BF16 and FP8 rows, not {pool.dtype}: give one of the two.")
    if value_width % (WARPGROUPS * COLUMNS) or value_width > 512 or rotary % COLUMNS:
        raise NotImplementedError(
            f"wgmma takes swizzled rows: a latent width in steps of {WARPGROUPS * COLUMNS} up to 512, a rotary width "
            f"in steps of {COLUMNS}, not {value_width} and {rotary}."
        )
    if fp8 and value_width % (WARPGROUPS * GROUP):
        raise NotImplementedError(
            f"a warpgroup keeps whole groups of {GROUP} columns, which share a scale: FP8 rows of a latent width in "
            f"steps of {WARPGROUPS * GROUP}, not {value_width}."
        )
    refuse_pages(page_size, TOKENS)
    interpret_params(interpret)
    padded = -(-heads // HEADS) * HEADS
    q = jnp.pad(q.astype(jnp.bfloat16), ((0, 0), (0, padded - heads), (0, 0)))
    work = config.plan(held) if work is None else work
    make: Any = hopper_fp8.items if fp8 else _items
    items = make(work, pages, held, q, pool, value_width=value_width, stages=config.stages, interpret=interpret)
    out, lse = triton.merge(work, items, interpret, "mla_decode")
    return out[:, :heads], lse[:, :heads]


def _items(
    work: Work,
    pages: jax.Array,
    held: jax.Array,
    q: jax.Array,
    pool: jax.Array,
    *,
    value_width: int,
    stages: int,
    interpret: bool,
) -> list[jax.Array]:
    """As `triton._items`."""
    rows, heads, columns = q.shape
    count = work.items.shape[0]
    half, rotary = value_width // WARPGROUPS, columns - value_width
    tiled: Any = {"transforms": (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(128))}
    copies = max(1, TOKENS // pool.shape[1])  # of every part of a block
    shapes = [(rows, heads, value_width), (rows, heads), (count, heads, value_width), (count, heads)]
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            page_size=pool.shape[1],
            value_width=value_width,
            stages=stages,
            interpreted=interpret,
        ),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid=(count, heads // HEADS),  # the last axis runs first: head blocks of an item share its rows in L2
        grid_names=("item", "heads"),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((WARPGROUPS, HEADS, half), pool.dtype, **tiled),
            plgpu.SMEM((HEADS, rotary), pool.dtype, **tiled),
            plgpu.SMEM((stages, WARPGROUPS, TOKENS, half), pool.dtype, **tiled),
            plgpu.SMEM((stages, TOKENS, rotary), pool.dtype, **tiled),
            plgpu.SMEM((HEADS,), jnp.float32),
            plgpu.Barrier(num_arrivals=WARPGROUPS + 1),  # queries are here
            plgpu.Barrier(num_arrivals=copies * (WARPGROUPS + 1), num_barriers=stages),  # a block is here
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),  # a block is done with
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret_params(interpret),
        kernel_name="mla_decode_hopper",
    )
    return list(kernel(work.items, pages, held, q, pool))


def _kernel(
    items: Any, pages: Any, held: Any, q: Any, pool: Any, out: Any, out_lse: Any, part: Any, part_lse: Any,
    q_latent: Any, q_rope: Any, latent: Any, rope: Any, lse_smem: Any, q_here: Any, here: Any, done: Any,
    *, page_size: int, value_width: int, stages: int, interpreted: bool,
) -> None:  # fmt: skip
    item, wg = lax.axis_index("item"), lax.axis_index("wg")
    heads = pl.ds(lax.axis_index("heads") * HEADS, HEADS)
    row, begin, end = (items[item, i] for i in range(3))
    at = jnp.maximum(row, 0)
    half = value_width // WARPGROUPS
    rotary = q_rope.shape[1]
    length = held[at]

    @pl.when(wg == WARPGROUPS)
    def _copy() -> None:
        plgpu.set_max_registers(COPYING, action="decrease")

        @pl.when(row >= 0)
        def _() -> None:
            for i in range(WARPGROUPS):
                plgpu.copy_gmem_to_smem(q.at[at, heads, pl.ds(i * half, half)], q_latent.at[i], q_here)
            plgpu.copy_gmem_to_smem(q.at[at, heads, pl.ds(value_width, rotary)], q_rope, q_here)

        together = min(page_size, TOKENS)  # tokens that one copy takes

        @pl.loop(begin, end)
        def _block(block: jax.Array) -> None:
            nth = block - begin
            slot = lax.rem(nth, stages)

            @pl.when(nth >= stages)
            def _() -> None:
                plgpu.barrier_wait(done.at[slot])

            for first in range(0, TOKENS, together):
                token = jnp.minimum(block * TOKENS + first, length - 1)  # a page without tokens is never read
                page, inside = pages[at, lax.div(token, page_size)], lax.rem(block * TOKENS + first, page_size)
                tokens = pl.ds(inside if page_size > together else 0, together)
                to = pl.ds(first, together)
                for i in range(WARPGROUPS):
                    columns = pl.ds(i * half, half)
                    plgpu.copy_gmem_to_smem(pool.at[page, tokens, columns], latent.at[slot, i, to], here.at[slot])
                columns = pl.ds(value_width, rotary)
                plgpu.copy_gmem_to_smem(pool.at[page, tokens, columns], rope.at[slot, to], here.at[slot])

    @pl.when(wg < WARPGROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTING, action="increase")
        pl.when(row >= 0)(lambda: plgpu.barrier_wait(q_here))

        def block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, top, total = carry
            slot = lax.rem(i - begin, stages)
            plgpu.barrier_wait(here.at[slot])

            mine = [q_latent.at[j] for j in range(WARPGROUPS)] + [q_rope]
            keys = [latent.at[slot, j] for j in range(WARPGROUPS)] + [rope.at[slot]]
            logits = masked_logits(mine, keys, length - i * TOKENS, interpreted) * LOG2E

            @pl.when(i * TOKENS + TOKENS > length)
            def _() -> None:
                zero_rows(latent.at[slot, wg], length - i * TOKENS, COLUMNS, interpreted)
                plgpu.commit_smem()

            new_top = jnp.maximum(top, logits.max(axis=1))
            scale = jnp.exp2(top - new_top)
            p = jnp.exp2(logits - over(new_top, shape=logits.shape))
            total = total * scale + p.sum(axis=1)
            acc = acc * over(scale, shape=acc.shape)
            p16 = p.astype(latent.dtype)

            acc = add_product(acc, p16, latent.at[slot, wg], interpreted)
            plgpu.barrier_arrive(done.at[slot])
            return acc, new_top, total

        acc = laid(jnp.zeros((HEADS, half), jnp.float32), plgpu.Layout.WGMMA, interpreted)
        top = laid(jnp.full((HEADS,), -1e30, jnp.float32), plgpu.Layout.WGMMA.reduce(1), interpreted)
        total = laid(jnp.zeros((HEADS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1), interpreted)
        acc, top, total = lax.fori_loop(begin, end, block, (acc, top, total))
        some = total != 0
        safe = jnp.where(some, total, jnp.ones_like(total))
        acc = acc * over(1.0 / safe, shape=acc.shape)
        lse = jnp.where(some, top / LOG2E + jnp.log(safe), jnp.full_like(top, -jnp.inf))
        columns = pl.ds(wg * half, half)

        def store(to: Any, to_lse: Any, place: jax.Array) -> None:
            to[place, heads, columns] = acc

            @pl.when(wg == 0)
            def _() -> None:
                lse_smem[...] = lse
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(lse_smem, to_lse.at[place, heads])
                plgpu.wait_smem_to_gmem(0)

        exists, alone = items[item, 0] >= 0, items[item, 3] == 1  # read late: there is no register to keep them in
        pl.when(exists & alone)(lambda: store(out, out_lse, items[item, 0]))
        pl.when(exists & ~alone)(lambda: store(part, part_lse, item))
