"""Replicated attention: whole projections, every history on every rank."""

from typing import final

from splash_jax.layouts.role import ReplicatedRows, cell
from splash_jax.ownership import History, Projections


@final
class Replicated(ReplicatedRows):
    """Every rank computes all of attention, so nothing is exchanged; dense and expert layers stay cut over ranks.

    No rank lacks anything: every other layout is a discard away. It is the placement of context parallelism with a
    replicated cache.
    """

    name = "rep"
    placement = cell(Projections.WHOLE, History.ALL)
