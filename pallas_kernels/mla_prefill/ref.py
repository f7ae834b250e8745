"""The oracle: the plain softmax of `mla_attention`, of absorbed queries, over rows stored in either format."""

import jax
import jax.numpy as jnp

from pallas_kernels.formats import is_fp8, unpack_fp8
from pallas_kernels.mla_attention import ref
from pallas_kernels.mla_attention.table import PageTable


def attend(
    q: jax.Array, pool: jax.Array, pages: jax.Array, seen: jax.Array, *, tile: int, value_width: int
) -> tuple[jax.Array, jax.Array]:
    """See `api.mla_prefill`, of absorbed queries and one row of `pages` per tile. Accepts every shape.

    A row that sees n tokens is a row at position n - 1 of a history whose tokens stand at their own indices.
    """
    if is_fp8(pool):
        pool, pages = unpack_fp8(pool[pages.reshape(-1)], value_width), jnp.arange(pages.size).reshape(pages.shape)
    tiles = pages.shape[0]
    table = PageTable(pages, seen.reshape(tiles, tile).max(1), jnp.zeros(tiles, jnp.int32))
    return ref.attend(q, seen - 1, pool, table, decode=0, tile=tile, value_width=value_width, shares=1, interleave=1)
