"""Whether histories fit: in pages, for real batches (Eq. 6 of arXiv 2609.37626), and during a switch (Eq. 5)."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from splash_jax.cost.load import Load
from splash_jax.ownership import KVShape, Layout, StateBytes, footprint, pages_that_fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a budget of bytes per rank holds in a layout."""

    pages: int  # per rank
    tokens: int  # distinct, on all ranks together

    def longest(self, batch: int, layout: Layout) -> int:
        """Tokens that each of `batch` requests alike may have, homes dealt out evenly (Eq. 1, uneven owners too).

        Of no request, what a first one may.
        """
        group_tokens = self.tokens // layout.owner_groups
        return group_tokens // -(-max(1, batch) // layout.owner_groups)


def capacity(state: StateBytes, layout: Layout, *, page_size: int, budget: int, reserve: int = 0) -> Capacity:
    """What `budget` bytes per rank hold beside weights, one layer in transit and a reserve (Eq. 1, 5, 6).

    Raises `ConfigError` with the bytes that lack where not a single page fits.
    """
    pages = pages_that_fit(state, layout, page_size=page_size, budget=budget, reserve=reserve)
    return Capacity(pages=pages, tokens=pages * page_size * layout.owner_groups * layout.position_shares)


class Room:
    """How many pages batches need in several layouts of one mesh, and how many there are."""

    def __init__(self, kv: KVShape, pages: Mapping[Layout, int]) -> None:
        """`pages` are those of every rank in each layout."""
        self.kv, self.pages = kv, dict(pages)
        self._ranks = next(iter(self.pages)).size
        self._shapes: dict[tuple[object, object], tuple[Layout, np.ndarray]] = {}
        for layout in self.pages:  # layouts that place histories alike are counted once
            key = layout.owner_axes, layout.position_axes
            if key not in self._shapes:
                self._shapes[key] = layout, _held(layout)

    def needed(self, load: Load) -> dict[Layout, np.ndarray]:
        """Pages that every rank needs for the load's histories, rounded up request by request. f64[T] each."""
        found = {}
        for key, (layout, held) in self._shapes.items():
            pages = _pages_by_lag(self.kv, layout, load.context)
            homes = np.stack([np.bincount(load.home, of_lag, self._ranks) for of_lag in pages])  # [lags, homes]
            found[key] = np.einsum("lh,lhr->r", homes, held)
        return {layout: found[layout.owner_axes, layout.position_axes] for layout in self.pages}

    def lacks(self, load: Load) -> dict[Layout, int]:
        """Pages that the fullest rank lacks for the load in each layout; 0 where it fits (Eq. 6)."""
        return {layout: max(0, int(need.max()) - self.pages[layout]) for layout, need in self.needed(load).items()}


def switch_lacks(
    state: StateBytes, src: Layout, dst: Layout, *, pages: Mapping[Layout, int], page_size: int, budget: int,
    reserve: int = 0,
) -> int:  # fmt: skip
    """Bytes that a rank lacks for a switch: the larger state, one layer in transit, and a reserve (Eq. 5); 0: none.

    Nothing is in transit where `dst` is `src`.
    """
    both = [footprint(state, one, pages=pages[one], page_size=page_size) for one in (src, dst)]
    steady = max(one.common + one.projections + one.kv for one in both)
    transit = 0 if src == dst else max(one.transit for one in both)
    return max(0, steady + transit + reserve - budget)


def _held(layout: Layout) -> np.ndarray:
    """1 where a rank holds the share `lag` of a history at home somewhere. f64[lags, homes, ranks]."""
    T = layout.size
    held = np.zeros((layout.position_shares, T, T))
    for home in range(T):
        for rank in layout.holders(home):
            held[layout.lag(home, rank), home, rank] = 1
    return held


def _pages_by_lag(kv: KVShape, layout: Layout, tokens: np.ndarray) -> np.ndarray:
    """`KVShape.pages_held` of every request for every lag. i64[lags, B]."""
    return kv.pages_held(layout, np.arange(layout.position_shares)[:, None], tokens)
