"""Entry point of the op: shapes, and which implementation serves them.

Letters: T tiles of Q rows, R = T * Q rows, H query heads, G key heads, D and V their widths, W pages per tile, P pages,
K tokens per page.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_pages, check_queries, indices, within_table
from pallas_kernels.chip import known_chip, target_chip
from pallas_kernels.gqa_attention import ref, triton
from pallas_kernels.gqa_attention.tuning import config_for
from pallas_kernels.launch import refuse_stored
from pallas_kernels.select import run_first

BACKENDS = ("triton", "ref")


def gqa_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    pages: jax.Array,
    seen: jax.Array,
    *,
    tile: int = 1,
    backend: str | None = None,
    chip: str | None = None,
    config: Any = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of query rows over the paged keys of their sequences: decode, and prefill by tiles.

    Rows come in tiles of `tile`, each of one sequence: a decode row is a tile of its own. H / G consecutive query heads
    share a key head. Row r sees the first seen[r] tokens that are held here of its sequence: for the last n rows of a
    history of h tokens that is h - n + 1 to h.

    Args:
      q: [R, H, D], scaled.
      keys, values: [P, K, G, D] and [P, K, G, V]. Pages and slots beyond what a tile's rows see are never read as
        numbers: they may hold NaN.
      pages: i32[T, W]: token t of the sequence of a tile lies in page pages[tile, t // K], slot t % K. Beyond what its
        rows see any number may stand.
      seen: i32[R], W * K at most; 0 or less for padding.
      tile: Q.
      backend: "triton" or "ref"; None takes the first that accepts: "ref" where the chip is none of CHIPS.
      chip: a key of CHIPS that the program is compiled for; None is the default device's.
      config: a `TileConfig`; None is the tuning table's.
      interpret: run the kernel without a GPU, slowly.

    Returns f32[R, H, V] and its log-sum-exp, base e, f32[R, H]; (0, -inf) for a row that sees nothing.
    Raises ValueError for shapes that contradict each other, NotImplementedError where the named backend refuses.
    """
    pages, seen = indices(pages=pages, seen=seen)
    (R, H, D), (P, K, G, width), T = q.shape, keys.shape, pages.shape[0]
    check_queries(R, H)
    check_pages(keys, pages)
    if values.shape[:3] != (P, K, G) or width != D or values.dtype != keys.dtype:
        raise ValueError(
            f"queries of {D} columns, but keys {keys.dtype}{list(keys.shape)} and values "
            f"{values.dtype}{list(values.shape)}: "
            "both need the same pages, slots, heads and dtype, keys the queries' width."
        )
    if not jnp.issubdtype(keys.dtype, jnp.floating):
        raise ValueError(f"keys and values are floating numbers, not {keys.dtype}.")
    if not D or not values.shape[3]:
        raise ValueError(f"keys of {D} columns and values of {values.shape[3]}: give both at least one.")
    if not G or H % G:
        raise ValueError(f"{H} query heads do not share {G} key heads alike.")
    if T * tile != R or seen.shape != (R,):
        raise ValueError(f"{T} tiles of {tile} rows, but {R} queries and {seen.shape[0]} counts of what they see.")
    seen = within_table(seen, keys, pages)
    target = target_chip(chip)

    def by_triton() -> tuple[jax.Array, jax.Array]:
        refuse_stored("keys", keys.dtype, interpret=interpret, fp8=False)
        chosen = config or config_for(known_chip(target, "triton"), D, tile * (H // G))
        return triton.attend(q, keys, values, pages, seen, tile=tile, config=chosen, interpret=interpret)

    def by_ref() -> tuple[jax.Array, jax.Array]:
        return ref.attend(q, keys, values, pages, seen, tile=tile)

    order = BACKENDS if target else ("ref",)
    return run_first("gqa_attention", {"triton": by_triton, "ref": by_ref}, order, backend)()
