"""Split-KV decode in Mosaic GPU for sm_100a: tcgen05 products into tensor memory, fed by TMA, one warpgroup a task.

A program meets 128 heads with 64 tokens at a time and keeps half of the latent's columns of the output: 128 x 512
float32 numbers would be all of tensor memory. The other half is the program's beside it, and both make all the logits,
which is 53 % more tensor-core work than a pair that shared them. Two programs that issue one product together
(`cta_group::2`) could share: no interpreter runs that, so it could not be proven here.

Tensor memory's 512 columns are 256 of output, 64 of logits, 32 of probabilities, and 160 that hold 320 of the queries'
576 columns. What is there needs no shared memory and is not read from it by every product: the 64 KiB of queries that
stay leave room for three blocks of kept columns, which live until their values are taken, and eight tiles of
64 x 64 for the columns that only logits need, which go as soon as a product has read them.

Three warpgroups: one copies, one issues products, one takes the softmax. The products of block i + 1's logits are
issued before those of block i's values, so that the softmax of a block runs beside the logits of the next. The output
is rescaled in blocks where some row's maximum rises. To wait until one rises by 2^8 would do with fewer, and round a
row's largest probability, which otherwise is 1: that doubled the largest errors. `blackwell_kernel` is what they run.
Of FP8 rows the first makes BF16 instead of copying it (`blackwell_fp8`).
"""

import functools
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import GROUP, fp8_views, is_fp8
from pallas_kernels.mla_decode import triton
from pallas_kernels.mla_decode.blackwell_kernel import HALVES, HEADS, WARPGROUPS, attend
from pallas_kernels.mla_decode.mosaic import COLUMNS, TOKENS, interpret_params, refuse_pages, refuse_rows
from pallas_kernels.mla_decode.work import Cut, Work, split_evenly

TMEM_COLUMNS = 512  # of 32 bits, in 128 lanes
SCRATCH = ALIGNED = 1024  # bytes of shared memory: for a maximum over warps, and what an array is rounded up to


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlackwellConfig:
    """One point of the tuning space."""

    stages: int  # blocks of kept columns in shared memory
    tiles: int  # of 64 tokens and 64 columns, for the columns that only logits need
    workers: int  # persistent pairs of programs, one worker's: as many as the chip holds at once
    overhead: int = 4  # what an item costs beside its blocks, in blocks

    @property
    def cut(self) -> Cut:
        """Of the work that it takes."""
        return Cut(TOKENS, self.workers, persistent=True)

    def smem_bytes(self, value_width: int) -> int:
        """Shared memory of one program; barriers left out."""
        kept = value_width // HALVES
        return 2 * kept * (HEADS + self.stages * TOKENS) + 2 * self.tiles * TOKENS * COLUMNS + ALIGNED + SCRATCH

    def plan(self, held: Any) -> Work:
        """See `TritonConfig.plan`."""
        return split_evenly(held, block=TOKENS, workers=self.workers, overhead=self.overhead)


def decode(
    q: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    held: jax.Array,
    *,
    value_width: int,
    config: BlackwellConfig,
    work: Work | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.mla_decode`. Refuses what tcgen05, tensor memory and TMA cannot take, and interpret mode before 0.12."""
    heads, columns = q.shape[1:]
    page_size, rotary = pool.shape[1], columns - value_width
    fp8 = is_fp8(pool)
    refuse_rows("Blackwell", pool, value_width)
    if value_width % (HALVES * COLUMNS) or value_width > 512 or rotary % COLUMNS:
        raise NotImplementedError(
            f"tcgen05 takes swizzled rows: a latent width in steps of {HALVES * COLUMNS} up to 512, a rotary width in "
            f"steps of {COLUMNS}, not {value_width} and {rotary}."
        )
    if tmem_columns(value_width, rotary) > TMEM_COLUMNS:
        raise NotImplementedError(
            f"a latent width of {value_width} and a rotary width of {rotary} take {tmem_columns(value_width, rotary)} "
            f"columns of tensor memory, which has {TMEM_COLUMNS}: take the triton backend."
        )
    refuse_pages(page_size)
    together = max(GROUP, rotary) // COLUMNS if fp8 else 1  # tiles that are filled together
    if config.stages < 2 or config.tiles < together:
        raise NotImplementedError(
            "a block waits for its values while the next one's logits are made: give at least 2 stages and "
            f"{together} tile{'s' * (together > 1)}, not {config.stages} and {config.tiles}."
        )
    interpret_params(interpret)
    padded = -(-heads // HEADS) * HEADS
    q = jnp.pad(q.astype(jnp.bfloat16), ((0, 0), (0, padded - heads), (0, 0)))
    work = config.plan(held) if work is None else work
    items = _items(work, pages, held, q, pool, value_width=value_width, config=config, interpret=interpret)
    out, lse = triton.merge(work, items, interpret, "mla_decode")
    return out[:, :heads], lse[:, :heads]


def tmem_columns(value_width: int, rotary: int) -> int:
    """Columns of tensor memory that a program uses: output, logits, probabilities, and the queries for tiles."""
    kept = value_width // HALVES
    return kept + TOKENS + TOKENS // 2 + (kept + rotary) // 2


def _items(
    work: Work,
    pages: jax.Array,
    held: jax.Array,
    q: jax.Array,
    pool: jax.Array,
    *,
    value_width: int,
    config: BlackwellConfig,
    interpret: bool,
) -> list[jax.Array]:
    """What `triton.merge` takes: outputs of rows that are one item, and parts of the others."""
    rows, heads, columns = q.shape
    count = work.items.shape[0]
    kept, rotary = value_width // HALVES, columns - value_width
    tiled: Any = {"transforms": (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(128))}
    fp8 = is_fp8(pool)
    copies = 1 if fp8 else max(1, TOKENS // pool.shape[1])  # of every part of a block, or its conversion
    tensor_barrier = functools.partial(plgpu.Barrier, orders_tensor_core=True)
    shapes = [(rows, heads, value_width), (rows, heads), (count, heads, value_width), (count, heads)]
    kernel = plgpu.kernel(
        functools.partial(attend, page_size=pool.shape[1], value_width=value_width),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid=(len(work.turns) - 1, heads // HEADS * HALVES),  # the last axis runs first: they share rows in L2
        grid_names=("worker", "part"),
        num_threads=WARPGROUPS,
        thread_name="wg",
        scratch_types={
            "q_kept": plgpu.SMEM((HEADS, kept), q.dtype, **tiled),
            "kept": plgpu.SMEM((config.stages, TOKENS, kept), q.dtype, **tiled),
            "tiles": plgpu.SMEM((config.tiles, TOKENS, COLUMNS), q.dtype, **tiled),
            "lse_smem": plgpu.SMEM((HEADS,), jnp.float32),
            "q_tiles": plgpu.TMEM((HEADS, kept + rotary), q.dtype, packed=True),
            "logits": plgpu.TMEM((HEADS, TOKENS), jnp.float32),
            "chances": plgpu.TMEM((HEADS, TOKENS), q.dtype, packed=True),
            "acc": plgpu.TMEM((HEADS, kept), jnp.float32),
            "q_copied": plgpu.Barrier(num_arrivals=1),
            "q_stored": tensor_barrier(num_arrivals=1),
            "q_done": tensor_barrier(num_arrivals=1),  # of what was copied
            "kept_here": plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages),
            "kept_done": tensor_barrier(num_arrivals=1, num_barriers=config.stages),
            "last_here": plgpu.Barrier(num_arrivals=1),  # of kept_here, for the warpgroup that masks the last block
            "tile_here": plgpu.Barrier(num_arrivals=copies, num_barriers=config.tiles),
            "tile_done": tensor_barrier(num_arrivals=1, num_barriers=config.tiles),
            "logits_made": tensor_barrier(num_arrivals=1),
            "logits_read": tensor_barrier(num_arrivals=1),
            "chances_made": tensor_barrier(num_arrivals=1),
            "values_added": tensor_barrier(num_arrivals=1),
        },
        # Of FP8 rows the kernel orders a warpgroup's threads by itself, for barriers around every store would hold the
        # converter: between a store to shared memory and whatever reads it lies a `commit_smem`, which all wait at.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=SCRATCH, unsafe_no_auto_barriers=fp8
        ),
        interpret=interpret_params(interpret, detect_races=True),
        kernel_name="mla_decode_blackwell" + "_fp8" * fp8,
    )
    return list(kernel(work.turns, work.items, pages, held, q, *(fp8_views(pool) if fp8 else (pool,))))
