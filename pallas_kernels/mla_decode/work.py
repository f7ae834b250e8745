"""Split-KV: ragged histories cut into items, so that few long ones fill a GPU too.

A program takes one item, of nearly equal length (`split_work`), or is persistent and takes several in turn, which
together are as long as any other program's (`split_evenly`).

Pure index arithmetic, of numpy on the host or compiled into the program: one program serves every mix of lengths. In a
program sums over comparisons stand where a search or a running sum would be loops of launches.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

WAVES = 4  # items per worker, at most, where a program takes one


class Cut(NamedTuple):
    """What work and the configuration of a kernel that takes it agree in."""

    block: int  # tokens
    workers: int
    persistent: bool  # whether programs take several items

    def __str__(self) -> str:
        return f"blocks of {self.block} for {self.workers} {'persistent ' * self.persistent}workers"


@partial(jax.tree_util.register_dataclass, data_fields=["items", "first", "turns"], meta_fields=["block", "workers"])
@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """N items over B rows, of JAX or numpy. Items of a row are consecutive; a row without history has one, empty."""

    # i32[N, 4]: row, first and last + 1 block of its history, and whether it is the row's only item.
    # Row is -1 where there is no item.
    items: Any
    first: Any  # i32[B + 1]: the items of row b are first[b] to first[b + 1]
    turns: Any  # i32[workers + 1]: worker w takes items turns[w] to turns[w + 1]; i32[0] where a program takes one
    block: int  # tokens of a block
    workers: int  # that it was balanced for

    @property
    def cut(self) -> Cut:
        """How it was cut."""
        return Cut(self.block, self.workers, len(self.turns) > 0)


def split_work(held: Any, *, block: int, workers: int, overhead: int) -> Work:
    """Cut i32[B] histories of `held` tokens, in blocks of `block`, into at most WAVES * `workers` + B items.

    Of a numpy array it is made in numpy.

    The longest item allowed is the one of WAVES candidates under which `workers` that take one item at a time would end
    first, where an item costs its blocks and `overhead` more (its start, and merging it).
    """
    xp = _numpy_of(held)
    blocks = _blocks(held, block, workers, overhead)
    waves = xp.arange(1, WAVES + 1, dtype=xp.int32)
    longest_W = xp.maximum(1, -(-blocks.sum() // (waves * workers)))
    items_WB = xp.maximum(1, -(-blocks[None] // longest_W[:, None]))
    ends_W = -(-items_WB.sum(1) // workers) * (longest_W + overhead)
    items_B = items_WB[xp.argmin(ends_W)]

    first, row, nth, exists = _enumerate(items_B, WAVES * workers + held.shape[0])
    of = items_B[row]
    base, more = blocks[row] // of, blocks[row] % of  # the first `more` items of a row have one block more
    begin = nth * base + xp.minimum(nth, more)
    end = begin + base + (nth < more).astype(xp.int32)
    items = _table(row, begin, end, of == 1, exists)
    return Work(items=items, first=first, turns=xp.zeros(0, xp.int32), block=block, workers=workers)


def split_evenly(held: Any, *, block: int, workers: int, overhead: int) -> Work:
    """Cut i32[B] histories of `held` tokens among `workers` that take their items one after another.

    Of a numpy array it is made in numpy. There are at most `workers` + B items.

    Rows lie on a line, each `overhead` blocks of nothing (an item's start, and merging it) and then its blocks, and
    every worker has an equal piece of the line: only rows across an end of a piece are cut. None is where whole rows,
    by the pieces that their middles lie in, are no more than a piece and `overhead` for any worker.
    """
    xp = _numpy_of(held)
    B = held.shape[0]
    blocks = _blocks(held, block, workers, overhead)
    rows = xp.arange(B, dtype=xp.int32)
    at = _running_sum(blocks) - blocks + (rows + 1) * overhead  # of every row's first block
    share = xp.maximum(1, -(-(blocks.sum(dtype=xp.int32) + B * overhead) // workers))
    middle = xp.minimum((at + (blocks - overhead) // 2) // share, workers - 1)
    taken_W = xp.where(middle[None] == xp.arange(workers)[:, None], blocks + overhead, 0).sum(1)
    whole = taken_W.max() <= share + overhead
    worker = xp.where(whole, middle, xp.minimum(at // share, workers - 1))  # of every row's first item
    last = xp.where(whole | (blocks == 0), worker, (at + blocks - 1) // share)

    items_B = last - worker + 1
    first, row, nth, exists = _enumerate(items_B, workers + B)
    worker = worker[row] + nth
    begin, end = (xp.clip((worker + i) * share - at[row], 0, blocks[row]) for i in range(2))
    begin, end = xp.where(whole, 0, begin), xp.where(whole, blocks[row], end)
    items = _table(row, begin, end, items_B[row] == 1, exists)
    ends = xp.arange(workers + 1, dtype=xp.int32)
    turns = (exists[None] & (worker[None] < ends[:, None])).sum(1, dtype=xp.int32)
    return Work(items=items, first=first, turns=turns, block=block, workers=workers)


def _blocks(held: Any, block: int, workers: int, overhead: int) -> Any:
    if workers < 1 or overhead < 0:
        raise ValueError(f"work is cut for 1 worker or more, with an overhead of 0 or more: not {workers}, {overhead}.")
    return -(-held.astype(np.int32).clip(0) // block)


def _numpy_of(held: Any) -> Any:
    return np if isinstance(held, np.ndarray) else jnp


def _running_sum(x_B: Any) -> Any:
    if isinstance(x_B, np.ndarray):
        return x_B.cumsum(dtype=np.int32)
    rows = jnp.arange(x_B.shape[0], dtype=jnp.int32)
    return jnp.where(rows[None] <= rows[:, None], x_B[None], 0).sum(1, dtype=jnp.int32)


def _enumerate(items_B: Any, count: int) -> tuple[Any, Any, Any, Any]:
    """`first` of `Work`, and of `count` items the row, which of the row's it is, and whether it exists."""
    xp = _numpy_of(items_B)
    first = xp.concatenate([xp.zeros(1, xp.int32), _running_sum(items_B)])
    item = xp.arange(count, dtype=xp.int32)
    if xp is np:
        before = first[1:].searchsorted(item, "right")  # rows whose items all come earlier
    else:
        before = (first[None, 1:] <= item[:, None]).sum(1, dtype=jnp.int32)
    row = xp.minimum(before, items_B.shape[0] - 1)
    return first, row, item - first[row], item < first[-1]


def _table(row: Any, begin: Any, end: Any, alone: Any, exists: Any) -> Any:
    """`items` of `Work`."""
    xp = _numpy_of(row)
    columns = (xp.where(exists, row, -1), begin, xp.where(exists, end, begin), alone)
    return xp.stack([x.astype(xp.int32) for x in columns], -1)


def whole_rows(held: jax.Array, *, block: int, workers: int) -> Work:
    """One item for every row: where the rows alone fill the chip, there is nothing to cut and nothing to merge."""
    rows = jnp.arange(held.shape[0] + 1, dtype=jnp.int32)
    items = jnp.stack([rows[:-1], jnp.zeros_like(held), -(-held // block), jnp.ones_like(held)], -1)
    return Work(items=items, first=rows, turns=jnp.zeros(0, jnp.int32), block=block, workers=workers)
