"""Where `fp8_rows` puts BF16 in the Hopper kernel: whole blocks into a stage, with zeros behind the last token."""

from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import GROUP, Fp8Views
from pallas_kernels.mla_decode.fp8_rows import Converter, Part
from pallas_kernels.mla_decode.hopper_kernel import HALVES
from pallas_kernels.mla_decode.mosaic import COLUMNS, TOKENS, zero_rows


def convert_rows(
    pages: Any, pools: Any, row: jax.Array, begin: jax.Array, end: jax.Array, length: jax.Array, nth0: jax.Array,
    *, page_size: int, value_width: int, rotary: int, interpreted: bool, latent: Any, rope: Any, here: Any, done: Any,
    **_: Any,
) -> None:  # fmt: skip
    """`bring` of `hopper_kernel.attend` for FP8 rows, of which `pools` are the views."""
    converter = Converter(
        pool=Fp8Views(*pools), pages=pages, row=row, length=length, page_size=page_size, value_width=value_width,
        rotary=rotary, interpreted=interpreted,
    )  # fmt: skip
    converter.run(begin, end, _parts(latent, rope, here, done, interpreted), nth0)


def _parts(latent: Any, rope: Any, here: Any, done: Any, interpreted: bool) -> list[Part]:
    """Of a row, for a stage: the first waits until it is free, the last tells that it is full."""
    stages, half = latent.shape[0], latent.shape[3]

    def slot(nth: Any) -> Any:
        return lax.rem(nth, stages)

    def to(group: int) -> Any:
        which, inside = divmod(group * GROUP, half)

        def put(nth: Any, tokens: Any, column: int, numbers: jax.Array) -> None:
            latent[slot(nth), which, tokens, pl.ds(inside + column, GROUP)] = numbers

        return put

    def put_rope(nth: Any, tokens: Any, column: int, numbers: jax.Array) -> None:
        rope[slot(nth), tokens, pl.ds(column, COLUMNS)] = numbers

    def before(nth: Any) -> None:
        pl.when(nth >= stages)(lambda: plgpu.barrier_wait(done.at[slot(nth)]))

    def after(nth: Any, left: Any) -> None:
        @pl.when(left < TOKENS)
        def _() -> None:
            plgpu.commit_smem()  # what other threads stored is read here
            for which in range(HALVES):
                zero_rows(latent.at[slot(nth), which], left, COLUMNS, interpreted)

        plgpu.commit_smem()
        plgpu.barrier_arrive(here.at[slot(nth)])

    first, *others = (Part(group=g, width=GROUP, put=to(g)) for g in range(HALVES * half // GROUP))
    rotary = Part(group=None, width=COLUMNS, put=put_rope, after=after)
    return [replace(first, before=before), *others, rotary]
