"""Tiles of lines over the pages of one key head: a decode row is a tile of one row, and only its heads fill a block."""

from typing import Any

import jax

from pallas_kernels.launch import refuse_sizes
from pallas_kernels.mla_decode.triton import load_rows
from pallas_kernels.tiles import Part, TileConfig, attend_tiles


def attend(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    pages: jax.Array,
    seen: jax.Array,
    *,
    tile: int,
    config: TileConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.gqa_attention`. Refuses head widths as `refuse_sizes` does."""
    (R, H, D), (P, K, G, V), T = q.shape, values.shape, pages.shape[0]
    refuse_sizes({"key width": D, "value width": V})
    pools = (keys.reshape(P, K, G * D), values.reshape(P, K, G * V))

    def read(refs: list[Any], group: Any, page: Any, slot: Any, some: Any) -> Any:
        k_LD = load_rows(refs[0], page, slot, some, group * D, D)
        return [Part(k_LD)], [Part(load_rows(refs[1], page, slot, some, group * V, V))]

    q_TGND = q.astype(keys.dtype).reshape(T, tile, G, H // G, D).swapaxes(1, 2).reshape(T, G, -1, D)
    out, lse = attend_tiles(
        q_TGND, pools, pages, seen.reshape(T, tile), read=read, widths=(D,), value_widths=(V,), config=config,
        name="gqa_attention", interpret=interpret,
    )  # fmt: skip

    def rows(x: jax.Array, *last: int) -> jax.Array:
        return x.reshape(T, G, tile, H // G, *last).swapaxes(1, 2).reshape(R, H, *last)

    return rows(out, V), rows(lse)
