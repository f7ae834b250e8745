"""Tensor parallelism: projections split by head, every history on every rank."""

from typing import final

from splash_jax.layouts.role import ReplicatedRows, cell
from splash_jax.ownership import History, Projections


@final
class TensorParallel(ReplicatedRows):
    """All rows on every rank, H/T heads each, whole histories; outputs are all-reduced."""

    name = "tp"
    placement = cell(Projections.SPLIT, History.ALL)
