"""What a layout does around the local attention kernel: its roles, applied axis by axis."""

from collections.abc import Callable

import jax

from splash_jax.layouts.registry import ROLES
from splash_jax.ownership import Layout


class Exchange:
    """The exchanges of one layout, on local views inside `jax.shard_map` over its mesh.

    Rows between layers lie as [groups..., R, d], one leading dimension per owner axis; a rank carries all groups, or
    (where a role shards rows) only its own. The kernel sees the rows of one owner, [R, H', D], their heads in an order
    of the layout's own.

    Axes with owners come first on the way in and last on the way out, so that the others handle one owner's rows.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        owners = layout.owner_axes
        self._axes = [
            (ROLES[axis.role], axis.name, owners.index(axis.name) if axis.name in owners else -1)
            for axis in sorted(layout.axes, key=lambda axis: axis.name in owners)
        ]
        self._num_owner_axes = len(owners)
        self._replicating = tuple(axis.name for axis in layout.axes if not ROLES[axis.role].shards_rows)

    def carried_rows(self, x: jax.Array) -> jax.Array:
        """[all groups..., R, ...] to the groups that this rank carries between layers."""
        for role, axis, dim in self._axes:
            x = role.carried_rows(x, axis, dim)
        return x

    def own_rows(self, x: jax.Array) -> jax.Array:
        """[groups..., R, ...] as carried to the rows this rank holds the history of, [R, ...]."""
        for role, axis, dim in self._axes:
            x = role.own_rows(x, axis, dim)
        return x.reshape(x.shape[self._num_owner_axes :])

    def attend(self, q: jax.Array, kernel: Callable[[jax.Array], tuple[jax.Array, jax.Array]]) -> jax.Array:
        """Exchange queries, run `kernel` on [R, H', D], merge and exchange back.

        `q` is [groups..., R, heads here, D]; the result has the same leading dimensions and heads.
        """
        for role, axis, dim in reversed(self._axes):
            q = role.before(q, axis, dim)
        lead = q.shape[: self._num_owner_axes]
        out, lse = kernel(q.reshape(q.shape[self._num_owner_axes :]))
        for role, axis, _ in self._axes:
            out, lse = role.merge(out, lse, axis)
        out = out.astype(q.dtype).reshape(lead + out.shape)
        for role, axis, dim in self._axes:
            out = role.after(out, axis, dim)
        return out

    def reduce_heads(self, y: jax.Array) -> jax.Array:
        """Sum the output projection over the axes that split heads."""
        return jax.lax.psum(y, self.layout.head_axes) if self.layout.head_axes else y

    def gather_rows(self, x: jax.Array) -> jax.Array:
        """All rows of all groups on every rank, [groups..., R, d]."""
        for role, axis, dim in self._axes:
            x = role.gather_rows(x, axis, dim)
        return x

    def reduce_rows(self, y: jax.Array) -> jax.Array:
        """Sum partial rows [all groups..., R, d] over every rank, back to the rows a rank carries."""
        for role, axis, dim in self._axes:
            y = role.scatter_rows(y, axis, dim)
        return jax.lax.psum(y, self._replicating) if self._replicating else y

    def rank(self) -> jax.Array:
        """This rank's number, row-major over the axes. i32[]."""
        return jax.lax.axis_index(self.layout.axis_names)
