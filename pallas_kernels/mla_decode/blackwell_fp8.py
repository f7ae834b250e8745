"""Where `fp8_rows` puts BF16 in the Blackwell kernel: where TMA puts BF16 rows, columns to keep in stages and others in
tiles.

Each program of a pair makes all columns, as each reads all of BF16 rows. So a row is converted twice for 128 heads, as
often as by Triton's blocks of 64.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import GROUP, Fp8Views
from pallas_kernels.mla_decode.fp8_rows import Converter, Part
from pallas_kernels.mla_decode.mosaic import COLUMNS


def convert(
    pages: Any, pool: Fp8Views, row: jax.Array, begin: jax.Array, end: jax.Array, length: jax.Array, nth0: jax.Array,
    half: jax.Array, *, page_size: int, value_width: int, rotary: int, kept: Any, kept_here: Any, kept_done: Any,
    tiles: Any, tile_here: Any, tile_done: Any, **_: Any,
) -> None:  # fmt: skip
    """Blocks begin to end, in the order in which `_multiply` reads them, as `blackwell_kernel._copy`.

    Args:
      nth0: blocks that the program has had before.
      half: of the latent's columns, that the program keeps.
    """
    groups = kept.shape[2] // GROUP  # of a half
    each = GROUP // COLUMNS  # tiles of a group
    count = groups * each + rotary // COLUMNS  # tiles of a block

    def keep(group: int) -> Part:
        def slot(nth: Any) -> Any:
            return lax.rem(nth, kept.shape[0])

        def put(nth: Any, tokens: Any, column: int, numbers: jax.Array) -> None:
            kept[slot(nth), tokens, pl.ds(group * GROUP + column, GROUP)] = numbers

        def before(nth: Any) -> None:
            if group == 0:
                pl.when(nth >= kept.shape[0])(lambda: plgpu.barrier_wait(kept_done.at[slot(nth)]))

        def after(nth: Any, left: Any) -> None:
            if group == groups - 1:
                plgpu.commit_smem()
                plgpu.barrier_arrive(kept_here.at[slot(nth)])

        return Part(group=half * groups + group, width=GROUP, put=put, before=before, after=after)

    def tile(group: Any, first: int, size: int) -> Part:
        """Of a block's tiles `size` from `first` on."""

        def slot(nth: Any, i: int) -> Any:
            return lax.rem(nth * count + first + i, tiles.shape[0])

        def put(nth: Any, tokens: Any, column: int, numbers: jax.Array) -> None:
            tiles[slot(nth, column // COLUMNS), tokens] = numbers

        def before(nth: Any) -> None:
            for i in range(size):
                wait = nth * count + first + i >= tiles.shape[0]
                pl.when(wait)(lambda i=i: plgpu.barrier_wait(tile_done.at[slot(nth, i)]))

        def after(nth: Any, left: Any) -> None:
            plgpu.commit_smem()
            for i in range(size):
                plgpu.barrier_arrive(tile_here.at[slot(nth, i)])

        return Part(group=group, width=COLUMNS, put=put, before=before, after=after)

    others = [tile((1 - half) * groups + group, group * each, each) for group in range(groups)]
    parts = [*map(keep, range(groups)), *others, tile(None, groups * each, rotary // COLUMNS)]
    rows = Converter(
        pool=pool, pages=pages, row=row, length=length, page_size=page_size, value_width=value_width, rotary=rotary,
        interpreted=False,
    )  # fmt: skip
    rows.run(begin, end, parts, nth0)
