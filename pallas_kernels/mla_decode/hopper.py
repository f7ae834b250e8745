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

from pallas_kernels.mla_decode import triton
from pallas_kernels.mla_decode.formats import is_fp8
from pallas_kernels.mla_decode.work import Work, split_work

LOG2E = math.log2(math.e)
HEADS = TOKENS = 64  # of a block: the rows of a wgmma, and what two stages leave room for
COLUMNS = 64  # of BF16 that a row of a 128-byte swizzle holds
WARPGROUPS = 2  # that compute
INTERPRETER = "InterpretGPUParams"  # which JAX 0.10 has not


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

    def smem_bytes(self, columns: int) -> int:
        """Shared memory of one program, for rows of so many BF16 columns; barriers left out."""
        return 2 * columns * (HEADS + self.stages * TOKENS) + 4 * HEADS

    def plan(self, held: jax.Array) -> Work:
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
    if is_fp8(pool) or pool.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the Hopper kernel reads BF16 rows, not {'FP8' if is_fp8(pool) else pool.dtype}.")
    if value_width % (WARPGROUPS * COLUMNS) or value_width > 512 or rotary % COLUMNS:
        raise NotImplementedError(
            f"wgmma takes swizzled rows: a latent width in steps of {WARPGROUPS * COLUMNS} up to 512, a rotary width "
            f"in steps of {COLUMNS}, not {value_width} and {rotary}."
        )
    if page_size % TOKENS and (TOKENS % page_size or page_size % 8):
        raise NotImplementedError(
            f"TMA copies blocks of {TOKENS} tokens: pages of 8, 16, 32 or multiples of {TOKENS}, not {page_size}."
        )
    if interpret and not hasattr(plgpu, INTERPRETER):
        raise NotImplementedError(
            f"Mosaic GPU's interpret mode needs JAX 0.11 or newer, and this is {jax.__version__}."
        )
    padded = -(-heads // HEADS) * HEADS
    q = jnp.pad(q.astype(pool.dtype), ((0, 0), (0, padded - heads), (0, 0)))
    work = config.plan(held) if work is None else work
    items = _items(work, pages, held, q, pool, value_width=value_width, config=config, interpret=interpret)
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
    config: HopperConfig,
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
            stages=config.stages,
            interpreted=interpret,
        ),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid=(heads // HEADS, count),  # the head blocks of an item run side by side and share its rows in L2
        grid_names=("heads", "item"),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((WARPGROUPS, HEADS, half), pool.dtype, **tiled),
            plgpu.SMEM((HEADS, rotary), pool.dtype, **tiled),
            plgpu.SMEM((config.stages, WARPGROUPS, TOKENS, half), pool.dtype, **tiled),
            plgpu.SMEM((config.stages, TOKENS, rotary), pool.dtype, **tiled),
            plgpu.SMEM((HEADS,), jnp.float32),
            plgpu.Barrier(num_arrivals=WARPGROUPS + 1),  # queries are here
            plgpu.Barrier(num_arrivals=copies * (WARPGROUPS + 1), num_barriers=config.stages),  # a block is here
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=config.stages),  # a block is done with
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=getattr(plgpu, INTERPRETER)() if interpret else None,
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
    row, begin, end, alone = (items[item, i] for i in range(4))
    at = jnp.maximum(row, 0)
    half = value_width // WARPGROUPS
    rotary = q_rope.shape[1]
    length = held[at]
    laid = functools.partial(_laid, interpreted=interpreted)
    count = functools.partial(_count, interpreted=interpreted)

    @pl.when(wg == WARPGROUPS)
    def _copy() -> None:
        plgpu.set_max_registers(40, action="decrease")
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
        plgpu.set_max_registers(240, action="increase")
        plgpu.barrier_wait(q_here)

        def block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, top, total = carry
            slot = lax.rem(i - begin, stages)
            plgpu.barrier_wait(here.at[slot])

            def products(logits_ref: Any) -> jax.Array:
                for j in range(WARPGROUPS):
                    plgpu.wgmma(logits_ref, q_latent.at[j], _turned(latent.at[slot, j]))
                plgpu.wgmma(logits_ref, q_rope, _turned(rope.at[slot]))
                return logits_ref[...]

            logits = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((HEADS, TOKENS), jnp.float32)) * LOG2E
            token = count((HEADS, TOKENS), 1)
            logits = jnp.where(token < length - i * TOKENS, logits, -jnp.inf)

            @pl.when(i * TOKENS + TOKENS > length)
            def _() -> None:  # beyond the last token there may be NaN, and 0 times NaN is one
                which = count((TOKENS, COLUMNS), 0)
                for first in range(0, half, COLUMNS):  # a few at a time, to keep out of the accumulator's registers
                    own = latent.at[slot, wg, :, pl.ds(first, COLUMNS)]
                    values = own[...]
                    own[...] = jnp.where(which < length - i * TOKENS, values, jnp.zeros_like(values))
                plgpu.commit_smem()

            new_top = jnp.maximum(top, logits.max(axis=1))
            scale = jnp.exp2(top - new_top)
            p = jnp.exp2(logits - lax.broadcast_in_dim(new_top, logits.shape, [0]))
            total = total * scale + p.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(scale, acc.shape, [0])
            p16 = p.astype(latent.dtype)

            acc = _add_product(acc, p16, latent.at[slot, wg], interpreted)
            plgpu.barrier_arrive(done.at[slot])
            return acc, new_top, total

        acc = laid(jnp.zeros((HEADS, half), jnp.float32), plgpu.Layout.WGMMA)
        top = laid(jnp.full((HEADS,), -1e30, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        total = laid(jnp.zeros((HEADS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        acc, top, total = lax.fori_loop(begin, end, block, (acc, top, total))
        some = total != 0
        safe = jnp.where(some, total, jnp.ones_like(total))
        acc = acc * lax.broadcast_in_dim(1.0 / safe, acc.shape, [0])
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

        pl.when((row >= 0) & (alone == 1))(lambda: store(out, out_lse, at))
        pl.when((row >= 0) & (alone == 0))(lambda: store(part, part_lse, item))


def _turned(ref: Any) -> Any:
    """[a, b] seen as [b, a]; JAX 0.10 has a function for it, 0.12 a method."""
    return ref.transpose((1, 0)) if jax.__version_info__ >= (0, 11) else plgpu.transpose_ref(ref, (1, 0))


# Interpret mode knows no register layouts, no run_state and no wgmma on registers: these three stand in for them there.


def _laid(x: jax.Array, layout: Any, interpreted: bool) -> jax.Array:
    return x if interpreted else plgpu.layout_cast(x, layout)


def _count(shape: tuple[int, int], axis: int, interpreted: bool) -> jax.Array:
    if interpreted:
        return lax.broadcasted_iota(jnp.int32, shape, axis)
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _add_product(acc: jax.Array, p: jax.Array, values: Any, interpreted: bool) -> jax.Array:
    """acc + p @ values by a wgmma that keeps the accumulator in its registers."""
    if interpreted:
        return acc + jnp.dot(p, values[...], preferred_element_type=jnp.float32)
    accumulate: Any = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p, values))
    return accumulate(plgpu.WGMMAAccumulatorRef.init(acc))
