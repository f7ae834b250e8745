"""How histories are cut into work: every block once, evenly, on the host as in a program."""

import heapq
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, settings
from hypothesis import given as draw
from hypothesis import strategies as st

from pallas_kernels.mla_decode.work import WAVES, Work, split_evenly, split_work


def cut(how: Any, held: list[int], **static: int) -> tuple[Work, list[int]]:
    """Work of `held` tokens, and the blocks of every row. Every block is in it once, on the host and in a program."""
    work = jax.tree.map(np.asarray, jax.jit(partial(how, **static))(jnp.asarray(held, jnp.int32)))
    of_numpy = how(np.asarray(held, np.int32), **static)
    for mine, theirs in zip(jax.tree.leaves(of_numpy), jax.tree.leaves(work), strict=True):
        assert isinstance(mine, np.ndarray) and mine.dtype == np.int32 and np.array_equal(mine, theirs)
    items, first = work.items, work.first
    assert first[-1] <= len(items)
    blocks = [-(-n // work.block) for n in held]
    for row, count in enumerate(blocks):
        own = items[first[row] : first[row + 1]]
        assert len(own) >= 1 and (own[:, 0] == row).all() and (own[:, 3] == (len(own) == 1)).all()
        assert own[0, 1] == 0 and own[-1, 2] == count and (own[1:, 1] == own[:-1, 2]).all()
        assert (own[:, 2] > own[:, 1]).all() or count == 0
    assert (items[first[-1] :, 0] == -1).all() and (items[first[-1] :, 1] == items[first[-1] :, 2]).all()
    return work, blocks


HISTORIES = st.lists(st.integers(0, 400), min_size=6, max_size=6) | st.lists(st.integers(0, 9), min_size=6, max_size=6)
WORKERS_BLOCK_OVERHEAD = st.sampled_from([(1, 16, 0), (4, 1, 5), (9, 16, 2), (6, 64, 0), (3, 8, 4)])


@settings(max_examples=60)
@draw(HISTORIES, WORKERS_BLOCK_OVERHEAD)
def test_work_is_every_block_once_and_is_even(held, how):
    workers, block, overhead = how
    work, blocks = cut(split_work, held, block=block, workers=workers, overhead=overhead)
    assert len(work.items) == WAVES * workers + len(held) and not len(work.turns)
    sizes = work.items[:, 2] - work.items[:, 1]
    assert sizes.max() <= max(1, -(-sum(blocks) // workers)), "no item is more than a worker's even share"
    for row in range(len(held)):
        own = sizes[work.first[row] : work.first[row + 1]]
        assert own.max() - own.min() <= 1


@settings(max_examples=60)
@draw(HISTORIES, WORKERS_BLOCK_OVERHEAD)
@example([0, 0, 3, 0, 6, 0], (4, 1, 5))
def test_work_of_persistent_programs_is_every_block_once_and_is_even(held, how):
    workers, block, overhead = how
    work, blocks = cut(split_evenly, held, block=block, workers=workers, overhead=overhead)
    assert len(work.items) == workers + len(held)
    turns, sizes = work.turns, work.items[:, 2] - work.items[:, 1]
    assert len(turns) == workers + 1 and turns[0] == 0 and turns[-1] == work.first[-1] and (np.diff(turns) >= 0).all()
    share = max(1, -(-(sum(blocks) + overhead * len(held)) // workers))
    taken = [sizes[a:b].sum() + overhead * (b - a) for a, b in pairwise(turns)]
    assert max(taken) <= share + overhead, "and what is begun elsewhere begins anew"
    assert work.first[-1] - len(held) < workers, "a row is cut where a worker's share ends, and nowhere else"


@pytest.mark.parametrize(
    ("held", "workers", "items"),
    [
        ([640] * 4 + [3], 5, [1] * 5),  # by shares alone two would be cut: what is begun twice costs what it saves
        ([4096] * 128, 66, None),
        ([640] * 2, 5, [1] * 5),
    ],
)
def test_rows_are_cut_only_where_that_ends_sooner(held, workers, items):
    work, _ = cut(split_evenly, held, block=64, workers=workers, overhead=4)
    if items is None:
        assert work.first[-1] == len(held) and set(np.diff(work.turns)) == {1, 2}
    else:
        assert np.diff(work.turns).tolist() == items


@pytest.mark.parametrize("how", [split_work, split_evenly])
def test_odd_lengths_are_counted_and_odd_workers_refused(how):
    held = np.asarray([70, 0, 5], np.int64)
    want = how(held.astype(np.int32), block=16, workers=2, overhead=1)
    for odd in (held, held.astype(np.uint32), np.asarray([70, -40, 5])):
        got = how(odd, block=16, workers=2, overhead=1)
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    for workers, overhead in ((0, 1), (2, -1)):
        with pytest.raises(ValueError, match="for 1 worker or more, with an overhead of 0 or more: not"):
            how(held, block=16, workers=workers, overhead=overhead)


@pytest.mark.parametrize(("rows", "workers"), [(128, 66), (64, 132), (16, 132)])
def test_persistent_programs_end_sooner_than_items_handed_out(rows, workers):
    """Of ragged lengths: in blocks, with an item's overhead; the others go to whichever program is free, in order."""
    shares = []
    for seed in range(20):
        held = np.random.default_rng(seed).integers(1, 32000, rows).astype(np.int32)
        evenly, apart = (how(held, block=64, workers=workers, overhead=4) for how in (split_evenly, split_work))
        costs = evenly.items[:, 2] - evenly.items[:, 1] + 4
        ends = max(costs[a:b].sum() for a, b in pairwise(evenly.turns))
        free = [0] * workers
        for begin, end in apart.items[: apart.first[-1], 1:3]:
            heapq.heapreplace(free, free[0] + end - begin + 4)
        shares.append(ends / max(free))
        assert evenly.first[-1] - rows < (apart.first[-1] - rows) * 0.6, "and fewer parts are merged"
    assert np.median(shares) < 0.9
