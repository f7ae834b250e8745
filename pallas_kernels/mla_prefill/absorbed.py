"""The absorbed form: queries meet the latents themselves, so all heads of a tile's rows share one read of its keys.

FP8 latents become BF16 as they are, which loses nothing; the scale of a token's 128 columns is applied to the logits
and probabilities that they make.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats import GROUP, fp8_views, is_fp8
from pallas_kernels.launch import refuse_sizes, refuse_stored
from pallas_kernels.mla_decode.triton import load_rows
from pallas_kernels.tiles import Part, Parts, TileConfig, attend_tiles


def attend(
    q: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    seen: jax.Array,
    *,
    tile: int,
    value_width: int,
    config: TileConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.mla_prefill`, of absorbed queries and one row of `pages` per tile."""
    (R, H, D), T = q.shape, pages.shape[0]
    rotary = D - value_width
    refuse_sizes({"latent width": value_width, "rotary width": rotary})
    refuse_stored("rows", pool.dtype, interpret=interpret)
    if is_fp8(pool):
        pools, cast = tuple(fp8_views(pool)), jnp.bfloat16
    else:
        pools, cast = (pool,), pool.dtype
    parts = (GROUP,) * (value_width // GROUP) if is_fp8(pool) else (value_width,)

    def read(refs: list[Any], _group: Any, page: Any, slot: Any, some: Any) -> tuple[Parts, Parts]:
        rows = functools.partial(load_rows, page=page, slot=slot, mask=some)
        if not is_fp8(pool):
            latent = [Part(rows(refs[0], first=0, width=value_width))]
            return [*latent, Part(rows(refs[0], first=value_width, width=rotary))], latent
        values, scales, rope = refs
        latent = []
        for group in range(len(parts)):
            scale_L1 = rows(scales, first=value_width // 4 + group, width=1)
            latent.append(Part(rows(values, first=group * GROUP, width=GROUP).astype(cast), scale_L1.reshape(-1)))
        return [*latent, Part(rows(rope, first=(value_width + 4 * len(parts)) // 2, width=rotary))], latent

    out, lse = attend_tiles(
        q.astype(cast).reshape(T, 1, tile * H, D), pools, pages, seen.reshape(T, tile), read=read,
        widths=(*parts, rotary), value_widths=parts, config=config, name="mla_prefill", interpret=interpret,
    )  # fmt: skip
    return out.reshape(R, H, value_width), lse.reshape(R, H)
