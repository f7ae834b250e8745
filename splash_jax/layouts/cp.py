"""Context parallelism: whole projections, every rank a share of the positions."""

from typing import final

import jax

from splash_jax.layouts.merge import merge_over_axis
from splash_jax.layouts.role import ReplicatedRows, cell
from splash_jax.ownership import History, Projections


@final
class ContextParallel(ReplicatedRows):
    """All rows and all heads on every rank against 1/T of the positions; partial softmaxes are merged."""

    name = "cp"
    placement = cell(Projections.WHOLE, History.POSITION)

    def merge(self, out: jax.Array, lse: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
        return merge_over_axis(out, lse, axis)
