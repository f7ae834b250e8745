"""The moves of one switch, as arrays: who sends which grain to whom, and on which page it lands.

A history moves in grains: runs of positions that lie together on a page in both layouts (a whole page when both
deal out whole pages). Grains of all requests are numbered together, by the block of positions that they begin with.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from splash_jax.errors import PoolCorrupt
from splash_jax.ownership.layout import Layout, lags_of_holders
from splash_jax.ownership.manifest import Manifest
from splash_jax.ownership.travel import travel_axes

Pairs = np.ndarray  # i64[n, 2]: source and destination slot, in grains, of each grain that moves
Placed = Mapping[str, tuple[int, int]]  # request -> (home, tokens)
PageTable = Mapping[str, Mapping[int, tuple[int, ...]]]  # request -> rank -> pages in order of position


class Grains(NamedTuple):
    """What one rank holds under a layout, request after request, each in order of position. i64[n] each."""

    request: np.ndarray
    block: np.ndarray  # the number of its first block of positions
    local: np.ndarray  # which of its request's grains on this rank


class Moves(NamedTuple):
    """How every rank gets what it must hold."""

    local: tuple[Pairs, ...]  # per rank: grains that stay on it but change their slot
    sent: dict[tuple[int, int], Pairs]  # (source, destination rank) -> grains, in order of pairs


class Mover:
    """The histories of a manifest, on their way to a layout in which requests are `placed`."""

    def __init__(self, now: Manifest, dst: Layout, placed: Placed) -> None:
        self._now, self._dst, self._names = now, dst, list(now.requests)
        self.grain = now.kv.grain(now.layout, dst)
        self._per_page = now.kv.page_size // self.grain
        self._tokens = np.array([now.requests[name].num_tokens for name in self._names], np.int64)
        # how many blocks of positions all requests before each have, i64[requests + 1]
        self._first = np.concatenate([[0], np.cumsum(-(-self._tokens // now.kv.interleave))]).astype(np.int64)
        homes = [now.requests[name].home for name in self._names]
        self._homes = [placed[name][0] for name in self._names]
        self._before = [self._grains(now.layout, homes, rank) for rank in range(dst.size)]
        self._after = [self._grains(dst, self._homes, rank) for rank in range(dst.size)]
        pages = {name: request.pages for name, request in now.requests.items()}
        self._page = [self._page_of(grains, pages, rank) for rank, grains in enumerate(self._before)]

    def _grains(self, layout: Layout, homes: Sequence[int], rank: int) -> Grains:
        kv, lags = self._now.kv, lags_of_holders(layout)
        holds = [(i, lags[home][rank]) for i, home in enumerate(homes) if rank in lags[home]]
        member, lag = np.array(holds, np.int64).reshape(-1, 2).T
        count = -(-kv.tokens_held(layout, lag, self._tokens[member]) // self.grain)
        request, lag = np.repeat(member, count), np.repeat(lag, count)
        local = np.arange(len(request)) - np.repeat(np.cumsum(count) - count, count)
        position = kv.positions(layout, lag, local * self.grain)
        return Grains(request, self._first[request] + position // kv.interleave, local)

    def _page_of(self, grains: Grains, pages: PageTable, rank: int) -> np.ndarray:
        """Page of every grain on a rank. i64[n]."""
        each = [pages[name].get(rank, ()) for name in self._names]
        first = np.cumsum([0, *map(len, each)])
        need = -(-np.bincount(grains.request, minlength=len(each)) // self._per_page)
        if len(short := np.flatnonzero(np.diff(first) < need)):
            name = self._names[short[0]]
            raise PoolCorrupt(f"rank {rank} has fewer pages of request {name!r} than its tokens fill.")
        flat = np.array([page for some in each for page in some], np.int64)
        return flat[first[grains.request] + grains.local // self._per_page]

    def _begins(self, grains: Grains) -> np.ndarray:
        """Which of a rank's grains are the first of their page."""
        return np.flatnonzero(grains.local % self._per_page == 0)

    def _slots(self, grains: Grains, page: np.ndarray) -> np.ndarray:
        """Physical grain slot of each grain. i64[n]."""
        return page * self._per_page + grains.local % self._per_page

    def assign_pages(self, pages_per_rank: int) -> PageTable:
        """Choose every destination page, leaving in place what already has the right content and fits."""
        found: dict[str, dict[int, tuple[int, ...]]] = {name: {} for name in self._names}
        holders = lags_of_holders(self._dst)
        for rank in range(self._dst.size):
            pages = self._kept(rank, pages_per_rank)
            there = np.zeros(pages_per_rank, bool)
            there[pages[pages >= 0]] = True
            new = pages < 0
            pages[new] = np.flatnonzero(~there)[: np.count_nonzero(new)]
            after, flat = self._after[rank], pages.tolist()
            bounds = np.searchsorted(after.request[self._begins(after)], np.arange(len(self._names) + 1)).tolist()
            for i, name in enumerate(self._names):
                if rank in holders[self._homes[i]]:
                    found[name][rank] = tuple(flat[bounds[i] : bounds[i + 1]])
        return found

    def _kept(self, rank: int, pages_per_rank: int) -> np.ndarray:
        """For every page that a rank will hold: the page that has its content there now, or -1. i64[pages]."""
        before, after = self._before[rank], self._after[rank]
        old, new = self._begins(before), self._begins(after)
        had, wanted = (np.diff(np.append(first, len(g.local))) for first, g in ((old, before), (new, after)))
        page, grains = np.full(self._first[-1], -1), np.zeros(self._first[-1], np.int64)
        page[before.block[old]], grains[before.block[old]] = self._page[rank][old], had
        page[page >= pages_per_rank] = -1
        block = after.block[new]
        alike = grains[block] == wanted  # pages of several grains hold every n-th block: the same if n is
        if self._now.layout.position_shares != self._dst.position_shares:
            alike &= wanted == 1
        return np.where(alike, page[block], -1)

    def moves(self, pages: PageTable) -> Moves:
        """How every grain reaches every rank that must hold it, on its page of `pages` there."""
        T = self._dst.size
        where = np.full((T, self._first[-1]), -1)  # slot of every block's grain on every rank, before
        for rank, grains in enumerate(self._before):
            where[rank, grains.block] = self._slots(grains, self._page[rank])
        local: list[Pairs] = []
        lacking: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # of every rank: request, block, slot
        for rank, grains in enumerate(self._after):
            slot = self._slots(grains, self._page_of(grains, pages, rank))
            here = where[rank, grains.block]
            stay = (here >= 0) & (here != slot)
            local.append(np.stack([here[stay], slot[stay]], 1))
            lack = here < 0
            lacking.append((grains.request[lack], grains.block[lack], slot[lack]))
        sent: dict[tuple[int, int], Pairs] = {}
        sources = self._sources(where >= 0, [(request, block) for request, block, _ in lacking])
        for rank, ((_, block, slot), source) in enumerate(zip(lacking, sources, strict=True)):
            order = np.argsort(source, kind="stable")
            ends = np.searchsorted(source[order], np.arange(T + 1))
            for one in range(T):
                if len(mine := order[ends[one] : ends[one + 1]]):
                    sent[one, rank] = np.stack([where[one, block[mine]], slot[mine]], 1)
        return Moves(tuple(local), dict(sorted(sent.items())))

    def _sources(self, held: np.ndarray, lacking: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """Who sends each grain that a rank lacks: of those who hold it and exchange with it, else of all who hold it,
        the one with the least to send so far. `held` is bool[T, blocks]; i64[n] for every rank.
        """
        if (held.sum(0) <= 1).all():
            only = held.argmax(0)
            return [only[block] for _, block in lacking]
        still = [name for name in self._dst.axis_names if name not in travel_axes(self._now.layout, self._dst)]
        place = np.array([self._dst.index(rank, still) for rank in range(self._dst.size)])
        found, choices = [], []
        for rank, (_, block) in enumerate(lacking):
            may = held[:, block]
            near = may & (place == place[rank])[:, None]
            choices.append(np.where(near.any(0), near, may))
            found.append(choices[-1].argmax(0))
        if any((choice.sum(0) > 1).any() for choice in choices):
            self._spread(choices, [request for request, _ in lacking], found)
        return found

    def _spread(self, choices: list[np.ndarray], requests: list[np.ndarray], found: list[np.ndarray]) -> None:
        """Deal the grains with several senders out in `found`, request by request, rank by rank."""
        load = np.zeros(self._dst.size, np.int64)
        for i in range(len(self._names)):
            for rank, request in enumerate(requests):
                first, last = np.searchsorted(request, [i, i + 1])
                patterns, which = np.unique(choices[rank][:, first:last], axis=1, return_inverse=True)
                for k, pattern in enumerate(patterns.T):
                    mine = first + np.flatnonzero(which.ravel() == k)
                    found[rank][mine] = senders = _least_loaded(np.flatnonzero(pattern), load, len(mine))
                    load += np.bincount(senders, minlength=len(load))


def _least_loaded(ranks: np.ndarray, load: np.ndarray, count: int) -> np.ndarray:
    """`count` choices among ranks, each of one with the least load at its time; ties by number. i64[count]."""
    if len(ranks) == 1:
        return np.full(count, ranks[0])
    levels = load[ranks][:, None] + np.arange(count)  # what a rank has when it is chosen for the n-th time
    order = np.lexsort((np.repeat(ranks, count), levels.ravel()))[:count]
    return ranks[order // count]
