"""Which rows go to which owner: laid out on the host, as data."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Routing(NamedTuple):
    """N rows over T owners, with room for C rows of each."""

    rows: jax.Array  # i32[T, C]: the row that stands at each place of each owner; -1 where none does
    places: jax.Array  # i32[N]: owner * C + place of each row; -1 for a row of no owner, padding
    counts: jax.Array  # i32[T]: rows of each owner, in its first places


def route_rows(owners: np.ndarray, *, ranks: int, capacity: int) -> Routing:
    """Rows in their order to the owners i32[N] of them, -1 for padding.

    Raises ValueError for an owner that is no rank, or that has more rows than there is room for.
    """
    if owners.size and not (owners.min() >= -1 and owners.max() < ranks):
        raise ValueError(f"owners {owners.min()} to {owners.max()} are not all among ranks 0 to {ranks - 1}, or -1.")
    rows = np.full((ranks, capacity), -1, np.int32)
    places = np.full(owners.shape, -1, np.int32)
    counts = np.bincount(owners[owners >= 0], minlength=ranks).astype(np.int32)
    if counts.max(initial=0) > capacity:
        raise ValueError(
            f"owner {counts.argmax()} has {counts.max()} rows, but the exchange has room for {capacity}: use a larger "
            "capacity, or spread the requests."
        )
    for owner in range(ranks):
        own = np.flatnonzero(owners == owner)
        rows[owner, : len(own)] = own
        places[own] = owner * capacity + np.arange(len(own))
    return Routing(jnp.asarray(rows), jnp.asarray(places), jnp.asarray(counts))
