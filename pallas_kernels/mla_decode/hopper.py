"""Split-KV decode in Mosaic GPU for sm_90a: wgmma from shared memory, one warpgroup that fills it ahead of two.

A block of 64 heads meets 64 tokens at a time. The 512 float32 columns of 64 heads would not fit the registers of one
warpgroup, so two keep half of the latent's columns each. The leader makes the logits and hands probabilities and the
accumulator's factor over through shared memory; the follower is at most one block behind, so that its products run
beside the leader's softmax and next logits.

The third brings rows: of BF16 it issues TMA copies; of FP8 it makes BF16 (`hopper_rows`). It also puts zeros behind the
last token, where there may be NaN.

Programs are persistent: each takes the items of its turn, and the rows of an item arrive while the one before ends.
`hopper_kernel` is what they run.
"""

import functools
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import fp8_views, is_fp8
from pallas_kernels.mla_decode import triton
from pallas_kernels.mla_decode.hopper_kernel import HALVES, HEADS, attend, copy_rows
from pallas_kernels.mla_decode.hopper_rows import convert_rows
from pallas_kernels.mla_decode.mosaic import COLUMNS, TOKENS, interpret_params, refuse_pages, refuse_rows
from pallas_kernels.mla_decode.work import Cut, Work, split_evenly


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HopperConfig:
    """One point of the tuning space."""

    stages: int  # blocks of tokens in shared memory
    workers: int  # persistent programs of one head block: as many as the chip holds at once
    overhead: int = 4  # what an item costs beside its blocks, in blocks

    @property
    def cut(self) -> Cut:
        """Of the work that it takes."""
        return Cut(TOKENS, self.workers, persistent=True)

    def smem_bytes(self, columns: int) -> int:
        """Shared memory of one program, for rows of so many BF16 columns; barriers left out."""
        return 2 * columns * (HEADS + self.stages * TOKENS) + 2 * HEADS * TOKENS + 4 * HEADS

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
    config: HopperConfig,
    work: Work | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.mla_decode`. Refuses what wgmma and TMA cannot take, and interpret mode before JAX 0.12."""
    heads, columns = q.shape[1:]
    page_size, rotary = pool.shape[1], columns - value_width
    refuse_rows("Hopper", pool, value_width)
    if value_width % (HALVES * COLUMNS) or value_width > 512 or rotary % COLUMNS:
        raise NotImplementedError(
            f"wgmma takes swizzled rows: a latent width in steps of {HALVES * COLUMNS} up to 512, a rotary width "
            f"in steps of {COLUMNS}, not {value_width} and {rotary}."
        )
    refuse_pages(page_size)
    interpret_params(interpret)
    padded = -(-heads // HEADS) * HEADS
    q = jnp.pad(q.astype(jnp.bfloat16), ((0, 0), (0, padded - heads), (0, 0)))
    work = config.plan(held) if work is None else work
    items = _items(work, pages, held, q, pool, value_width=value_width, stages=config.stages, interpret=interpret)
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
    count, fp8, page_size = work.items.shape[0], is_fp8(pool), pool.shape[1]
    half, rotary = value_width // HALVES, columns - value_width
    tiled: Any = {"transforms": (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(128))}
    copies = (HALVES + 1) * max(1, TOKENS // page_size)  # of a block of BF16 rows
    if fp8:
        bring = functools.partial(convert_rows, page_size=page_size, value_width=value_width, rotary=rotary)
    else:
        bring = copy_rows
    shapes = [(rows, heads, value_width), (rows, heads), (count, heads, value_width), (count, heads)]
    kernel = plgpu.kernel(
        functools.partial(attend, bring=functools.partial(bring, interpreted=interpret), interpreted=interpret),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid=(len(work.turns) - 1, heads // HEADS),  # the last axis runs first: head blocks share an item's rows in L2
        grid_names=("worker", "heads"),
        num_threads=3,
        thread_name="wg",
        scratch_types={
            "q_latent": plgpu.SMEM((HALVES, HEADS, half), q.dtype, **tiled),
            "q_rope": plgpu.SMEM((1, HEADS, rotary), q.dtype, **tiled),
            "latent": plgpu.SMEM((stages, HALVES, TOKENS, half), q.dtype, **tiled),
            "rope": plgpu.SMEM((stages, TOKENS, rotary), q.dtype, **tiled),
            "p_smem": plgpu.SMEM((HEADS, TOKENS), q.dtype, **tiled),
            "factor": plgpu.SMEM((HEADS,), jnp.float32),
            "q_here": plgpu.Barrier(num_arrivals=HALVES + 1),
            "q_done": plgpu.Barrier(num_arrivals=1),
            "here": plgpu.Barrier(num_arrivals=1 if fp8 else copies, num_barriers=stages),
            "landed": plgpu.Barrier(num_arrivals=copies),  # a block that needs zeros before it is here
            "done": plgpu.Barrier(num_arrivals=HALVES, num_barriers=stages),
            "p_here": plgpu.Barrier(num_arrivals=1),
            "p_done": plgpu.Barrier(num_arrivals=1),
        },
        # Sums and maxima stay within four lanes, and so need no scratch. The kernel orders a warpgroup's threads by
        # itself: between a store to shared memory and whatever reads it lies a `commit_smem`, which they all wait at.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret_params(interpret),
        kernel_name="mla_decode_hopper" + "_fp8" * fp8,
    )
    return list(kernel(work.turns, work.items, pages, held, q, *(fp8_views(pool) if fp8 else (pool,))))
