"""Selected tokens gathered by address and attended to, by the item kernel of `mla_decode`.

A row's list is cut into items as a history is; only what `find` answers differs. Nothing is shared between the rows of
a prompt: each reads its own tokens, which mostly are its neighbours' too and so lie in L2.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.mla_decode.triton import TritonConfig, views
from pallas_kernels.mla_decode.triton import attend as attend_found
from pallas_kernels.mla_decode.work import WAVES, Work, split_work, whole_rows
from pallas_kernels.sparse_mla.places import counts_of, places_of


def plan(counts: jax.Array, config: TritonConfig) -> Work:
    """Items for i32[R] lists of `counts` columns: whole rows where they fill the chip WAVES times, else cut."""
    cut = whole_rows if counts.shape[0] >= WAVES * config.workers else partial(split_work, overhead=config.overhead)
    return cut(counts, block=config.block_tokens, workers=config.workers)


def attend(
    q: jax.Array,
    pool: jax.Array,
    selected: jax.Array,
    pages: jax.Array,
    *,
    value_width: int,
    config: TritonConfig,
    work: Work | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.sparse_mla`. Refuses what `mla_decode`'s kernel does: see `views`."""
    tokens = pool.reshape(-1, 1, pool.shape[-1])  # pages of one token: a place is a page
    pools = views(q, tokens, value_width=value_width, config=config, interpret=interpret)
    places = places_of(selected, pages, pool.shape[1])
    counts = counts_of(places)
    work = plan(counts, config) if work is None else work
    static: dict[str, Any] = {"value_width": value_width, "config": config, "interpret": interpret}
    return attend_found(q, pools, counts, places, _by_place, work, name="sparse_mla", **static)


def _by_place(
    places: Any, row: jax.Array, column: jax.Array, mine: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    place = pltriton.load(places.at[row, column], mask=mine, other=-1)
    return jnp.maximum(place, 0), jnp.zeros_like(place), place >= 0
