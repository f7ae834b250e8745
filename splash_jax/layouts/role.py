"""What a role must say. To add a role: write its file, add its line to the registry."""

from abc import ABC, abstractmethod
from typing import ClassVar

import jax

from splash_jax.ownership import History, Placement, Projections


class AbstractRole(ABC):
    """One way to parallelise attention over one mesh axis.

    Arrays are the local views inside `jax.shard_map`. Rows lie as [groups..., R, ...]: one leading dimension per
    owner axis of the layout, then the rows of one owner. `dim` is this axis's leading dimension, or -1 where the role
    has no owners. Heads are always the dimension before last of queries and outputs.
    """

    name: ClassVar[str]
    placement: ClassVar[Placement]
    shards_rows: ClassVar[bool] = False  # whether a rank carries only its own requests' rows between layers

    @abstractmethod
    def carried_rows(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        """Of rows of all groups, those that a rank carries between layers."""

    @abstractmethod
    def own_rows(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        """Of the carried rows, those whose history this rank holds: dimension `dim` is then 1."""

    @abstractmethod
    def before(self, q: jax.Array, axis: str, dim: int) -> jax.Array:
        """Bring queries [groups..., R, heads here, D] to what the local kernel needs."""

    @abstractmethod
    def merge(self, out: jax.Array, lse: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
        """Combine partial outputs [R, H, D] and their log-sum-exp [R, H] over the axis; heads may be scattered."""

    @abstractmethod
    def after(self, out: jax.Array, axis: str, dim: int) -> jax.Array:
        """Bring outputs [groups..., R, H, D] to the heads whose output projection this rank holds."""

    @abstractmethod
    def gather_rows(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        """All rows, for the dense and expert layers."""

    @abstractmethod
    def scatter_rows(self, y: jax.Array, axis: str, dim: int) -> jax.Array:
        """Where rows are sharded: sum partial rows over the axis, leaving each rank those it carries. Else nothing."""


class ReplicatedRows(AbstractRole):
    """Shared by roles in which every rank carries all rows and no axis has owners."""

    def carried_rows(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        return x

    def own_rows(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        return x

    def before(self, q: jax.Array, axis: str, dim: int) -> jax.Array:
        return q

    def merge(self, out: jax.Array, lse: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
        return out, lse

    def after(self, out: jax.Array, axis: str, dim: int) -> jax.Array:
        return out

    def gather_rows(self, x: jax.Array, axis: str, dim: int) -> jax.Array:
        return x

    def scatter_rows(self, y: jax.Array, axis: str, dim: int) -> jax.Array:
        return y


def cell(projections: Projections, history: History) -> Placement:
    """The cell of the grid of roles with these two facts."""
    return Placement(projections, history)
