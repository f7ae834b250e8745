"""Split-KV: ragged histories cut into items of nearly equal length, so that few long ones fill a GPU too.

Pure index arithmetic, of numpy on the host or compiled into the program: one program serves every mix of lengths. In a
program sums over comparisons stand where a search or a running sum would be loops of launches.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WAVES = 4  # items per worker, at most


@partial(jax.tree_util.register_dataclass, data_fields=["items", "first"], meta_fields=["block", "workers"])
@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """N items over B rows, of JAX or numpy. Items of a row are consecutive; a row without history has one, empty."""

    # i32[N, 4]: row, first and last + 1 block of its history, and whether it is the row's only item.
    # Row is -1 where there is no item.
    items: Any
    first: Any  # i32[B + 1]: the items of row b are first[b] to first[b + 1]
    block: int  # tokens of a block
    workers: int  # that it was balanced for


def split_work(held: Any, *, block: int, workers: int, overhead: int) -> Work:
    """Cut i32[B] histories of `held` tokens, in blocks of `block`, into at most WAVES * `workers` + B items.

    Of a numpy array it is made in numpy.

    The longest item allowed is the one of WAVES candidates under which `workers` that take one item at a time would end
    first, where an item costs its blocks and `overhead` more (its start, and merging it).
    """
    on_host = isinstance(held, np.ndarray)
    xp: Any = np if on_host else jnp
    blocks = -(-held // block)
    waves = xp.arange(1, WAVES + 1, dtype=xp.int32)
    longest_W = xp.maximum(1, -(-blocks.sum() // (waves * workers)))
    items_WB = xp.maximum(1, -(-blocks[None] // longest_W[:, None]))
    ends_W = -(-items_WB.sum(1) // workers) * (longest_W + overhead)
    items_B = items_WB[xp.argmin(ends_W)]
    rows = xp.arange(held.shape[0], dtype=xp.int32)
    if on_host:
        upto_B = items_B.cumsum(dtype=np.int32)
    else:
        upto_B = jnp.where(rows[None] <= rows[:, None], items_B[None], 0).sum(1, dtype=jnp.int32)
    first = xp.concatenate([xp.zeros(1, xp.int32), upto_B])

    item = xp.arange(WAVES * workers + held.shape[0], dtype=xp.int32)
    if on_host:
        before = first[1:].searchsorted(item, "right")  # rows whose items all come earlier
    else:
        before = (first[None, 1:] <= item[:, None]).sum(1, dtype=jnp.int32)
    row = xp.minimum(before, held.shape[0] - 1)
    nth, of = item - first[row], items_B[row]
    exists = item < first[-1]
    base, more = blocks[row] // of, blocks[row] % of  # the first `more` items of a row have one block more
    begin = nth * base + xp.minimum(nth, more)
    end = begin + base + (nth < more).astype(xp.int32)
    columns = (xp.where(exists, row, -1), begin, xp.where(exists, end, begin), of == 1)
    items = xp.stack([x.astype(xp.int32) for x in columns], -1)
    return Work(items=items, first=first, block=block, workers=workers)


def whole_rows(held: jax.Array, *, block: int, workers: int) -> Work:
    """One item for every row: where the rows alone fill the chip, there is nothing to cut and nothing to merge."""
    rows = jnp.arange(held.shape[0] + 1, dtype=jnp.int32)
    items = jnp.stack([rows[:-1], jnp.zeros_like(held), -(-held // block), jnp.ones_like(held)], -1)
    return Work(items=items, first=rows, block=block, workers=workers)
