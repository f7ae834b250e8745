"""Decode context parallelism ("Helix"): projections split by head, every rank a share of the positions."""

from typing import final

import jax

from splash_jax.layouts.merge import scatter_over_axis
from splash_jax.layouts.role import ReplicatedRows, cell
from splash_jax.ownership import History, Projections


@final
class DecodeContextParallel(ReplicatedRows):
    """All rows on every rank; heads are gathered for the local kernel, and merging scatters them again.

    A rank receives (1 - 1/T) N H (d_q + d_z + 1) elements in the two exchanges of a layer, about T times what `dop`
    brings it, and the largest log-sum-exp of every row and head.
    """

    name = "dcp"
    placement = cell(Projections.SPLIT, History.POSITION)

    def before(self, q: jax.Array, axis: str, dim: int) -> jax.Array:
        return jax.lax.all_gather(q, axis, axis=q.ndim - 2, tiled=True)

    def merge(self, out: jax.Array, lse: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
        return scatter_over_axis(out, lse, axis)
