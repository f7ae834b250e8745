"""The absorbed form: queries meet the latents themselves, so all heads of a tile's rows share one read of its keys."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mla_decode.formats import fp8_row_bytes, fp8_views, is_fp8
from pallas_kernels.mla_decode.triton import fp8_rows, plain_rows
from pallas_kernels.tiles import TileConfig, attend_tiles, check_sizes


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
    check_sizes({"latent width": value_width, "rotary width": rotary, "block of lines": config.block_lines})
    if is_fp8(pool):
        fp8_row_bytes(value_width, rotary)
        pools, cast = tuple(fp8_views(pool)), jnp.bfloat16
    else:
        pools, cast = (pool,), pool.dtype
    if cast == jnp.float32 and not interpret:
        raise NotImplementedError("float32 rows do not fit in shared memory: give BF16 or FP8 rows.")
    rows = fp8_rows if is_fp8(pool) else plain_rows

    def read(refs: list[Any], _group: Any, page: Any, slot: Any, some: Any) -> Any:
        k_V, k_R = rows(refs, page, slot, some, value_width, rotary)
        return (k_V, k_R), k_V

    out, lse = attend_tiles(
        q.astype(cast).reshape(T, 1, tile * H, D), pools, pages, seen.reshape(T, tile), read=read,
        widths=(value_width, rotary), value_width=value_width, config=config, name="mla_prefill", interpret=interpret,
    )  # fmt: skip
    return out.reshape(R, H, value_width), lse.reshape(R, H)
