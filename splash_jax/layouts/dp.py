"""Data-parallel attention: whole projections, every request's rows and history on its owner."""

from typing import final

import jax

from splash_jax.layouts.role import AbstractRole, cell
from splash_jax.ownership import History, Projections


@final
class DataParallel(AbstractRole):
    """A rank carries only its own requests' rows; dense and expert layers gather rows and scatter their sums."""

    name = "dp"
    placement = cell(Projections.WHOLE, History.REQUEST)
    shards_rows = True

    def carried_rows(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis), 1, dim)

    def own_rows(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        return x

    def before(self, q: jax.Array, axis: str, dim: int) -> jax.Array:
        return q

    def merge(self, out: jax.Array, lse: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
        return out, lse

    def after(self, out: jax.Array, axis: str, dim: int) -> jax.Array:
        return out

    def gather_rows(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        return jax.lax.all_gather(x, axis, axis=dim, tiled=True)

    def scatter_rows(self, y: jax.Array, axis: str, dim: int) -> jax.Array:
        return jax.lax.psum_scatter(y, axis, scatter_dimension=dim, tiled=True)
