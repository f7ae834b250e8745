"""Bytes of state per rank under a layout, and how many pages a budget leaves (arXiv 2609.37626, Eq. 1, 5, 6)."""

import math
from dataclasses import dataclass

from splash_jax.errors import ConfigError
from splash_jax.ownership.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Sizes that do not depend on the layout. All in bytes."""

    projections: int  # one layer's attention projections whose placement changes (Eq. 9), one whole copy
    common: int  # everything that stays as it is in every layout, per rank
    kv_per_token: int  # one layer's history, per token
    num_layers: int


IN_TRANSIT = 4  # a moving layer's pages exist as sent, received, relocated and in the resized pool, beside the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one rank holds under a layout. Bytes, except `pages`."""

    common: int
    projections: int
    kv: int
    pages: int
    transit: int  # room for one layer on the move in a switch (Eq. 5): projections, `IN_TRANSIT` times its pages

    @property
    def total(self) -> int:
        return self.common + self.projections + self.kv + self.transit


def projection_bytes(state: StateBytes, layout: Layout) -> int:
    """Bytes of attention projections per rank: W_A, or W_A / T where they are split."""
    return state.projections * state.num_layers // layout.head_shards


def pages_that_fit(state: StateBytes, layout: Layout, *, page_size: int, budget: int, reserve: int) -> int:
    """Pages per rank that `budget` bytes leave under a layout, room for one layer in transit kept free.

    Raises `ConfigError` with the bytes that lack when not a single page fits.
    """
    page = page_size * state.kv_per_token
    fixed = state.common + projection_bytes(state, layout) + state.projections + reserve
    pages = (budget - fixed) // (page * (state.num_layers + IN_TRANSIT))
    if pages < 1:
        short = fixed + page * (state.num_layers + IN_TRANSIT) - budget
        raise ConfigError(
            f"layout {layout} does not fit: {_told(budget)} per rank lack {_told(short)} for one page of {page_size} "
            f"tokens beside {_told(fixed)} of weights, transit and reserve. Raise device_memory_bytes or num_devices."
        )
    return pages


def _told(count: int) -> str:
    """A number of bytes in a message: exact up to seven digits."""
    return f"{count} bytes" if count < 10**7 else f"{count / 2**30:,.2f} GiB"


def footprint(state: StateBytes, layout: Layout, *, pages: int, page_size: int) -> Footprint:
    """What a rank holds with `pages` pages allocated under `layout`."""
    page = page_size * state.kv_per_token
    return Footprint(
        common=state.common,
        projections=projection_bytes(state, layout),
        kv=pages * page * state.num_layers,
        pages=pages,
        transit=state.projections + IN_TRANSIT * pages * page,
    )


def kv_bytes(state: StateBytes, layout: Layout, num_tokens: list[int]) -> int:
    """History bytes on the busiest rank for balanced requests (Eq. 1): Bks, or Bks / T where nothing is redundant."""
    total = sum(num_tokens) * state.kv_per_token * state.num_layers
    return math.ceil(total / (layout.owner_groups * layout.position_shares))
