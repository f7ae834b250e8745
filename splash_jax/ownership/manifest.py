"""What every rank holds of every live request, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from splash_jax.ownership.layout import Layout

Ints = TypeVar("Ints", int, np.ndarray)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """How histories are cut: pages of `page_size` tokens, dealt out in blocks of `interleave` consecutive positions."""

    page_size: int
    interleave: int
    bytes_per_token: int  # of one layer, on one rank that holds the token

    def grain(self, src: Layout, dst: Layout) -> int:
        """Tokens that stay together when a history moves between two layouts."""
        alike = src.position_axes == dst.position_axes or src.position_shares == dst.position_shares == 1
        return self.page_size if alike else self.interleave

    def tokens_held(self, layout: Layout, lag: Ints, num_tokens: Ints) -> Ints:
        """Tokens that the rank `lag` shares after the home holds of a history of `num_tokens`.

        Both are ints, or i64 arrays that broadcast.
        """
        shares = layout.position_shares
        blocks, rest = divmod(num_tokens, self.interleave)
        whole = blocks // shares + (blocks % shares > lag)
        return whole * self.interleave + rest * (blocks % shares == lag)  # pyright: ignore[reportReturnType]

    def pages_held(self, layout: Layout, lag: Ints, num_tokens: Ints) -> Ints:
        return -(-self.tokens_held(layout, lag, num_tokens) // self.page_size)

    def positions(self, layout: Layout, lag: int | np.ndarray, local: np.ndarray) -> np.ndarray:
        """Global position of each local token index of a rank; the inverse of `local_index`. Any shape, integers."""
        block = local // self.interleave * layout.position_shares + lag
        return block * self.interleave + local % self.interleave

    def local_index(self, layout: Layout, positions: np.ndarray) -> np.ndarray:
        """Local token index of global positions on the ranks that hold them. Any shape, integers."""
        block = positions // self.interleave
        return block // layout.position_shares * self.interleave + positions % self.interleave

    def lag_of(self, layout: Layout, positions: np.ndarray) -> np.ndarray:
        """Which lag holds each global position. Any shape, integers."""
        return positions // self.interleave % layout.position_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPages:
    """The stored history of one request.

    `home` is the rank that owns it where a layout has owners and that holds its first block where positions are
    dealt out; `pages[rank]` lists that rank's pages in order of position, for exactly the ranks that hold some of it.
    """

    home: int
    num_tokens: int
    pages: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Where the histories of all live requests are under one layout."""

    layout: Layout
    kv: KVShape
    pages_per_rank: int
    requests: Mapping[str, RequestPages]

    def pages_used(self) -> list[int]:
        """Pages in use on each rank."""
        used = [0] * self.layout.size
        for request in self.requests.values():
            for rank, pages in request.pages.items():
                used[rank] += len(pages)
        return used


def owner_pages_needed(kv: KVShape, layout: Layout, requests: Mapping[str, tuple[int, int]]) -> list[int]:
    """Pages that each rank needs for requests given as name -> (home, num_tokens)."""
    need = [0] * layout.size
    for home, num_tokens in requests.values():
        for rank in layout.holders(home):
            need[rank] += kv.pages_held(layout, layout.lag(home, rank), num_tokens)
    return need
