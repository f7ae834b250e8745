"""Decoupled ownership: projections split by head, every history on its owner (arXiv 2609.37626, section 3)."""

from typing import final

import jax

from splash_jax.layouts.role import AbstractRole, cell
from splash_jax.ownership import History, Projections


@final
class DecoupledOwnership(AbstractRole):
    """All rows on every rank for the projections; an all-to-all takes heads to owners' rows, a second takes them back.

    The two exchanges of a layer receive (1 - 1/T) N H (d_q + d_z) elements in aggregate (Eq. 4).
    """

    name = "dop"
    placement = cell(Projections.SPLIT, History.REQUEST)

    def carried_rows(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        return x

    def own_rows(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis), 1, dim)

    def before(self, q: jax.Array, axis: str, dim: int) -> jax.Array:
        return jax.lax.all_to_all(q, axis, split_axis=dim, concat_axis=q.ndim - 2, tiled=True)

    def merge(self, out: jax.Array, lse: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
        return out, lse

    def after(self, out: jax.Array, axis: str, dim: int) -> jax.Array:
        return jax.lax.all_to_all(out, axis, split_axis=out.ndim - 2, concat_axis=dim, tiled=True)

    def gather_rows(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        return x

    def scatter_rows(self, y: jax.Array, axis: str, dim: int) -> jax.Array:
        return y
