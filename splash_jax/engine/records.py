"""What an engine did, step by step: for logs, tables and plots."""

from dataclasses import dataclass

from splash_jax.ownership import SwitchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step. Bytes are per rank; `seconds` runs from its dispatch, or the last step's results, to its results."""

    step: int
    layout: str
    bucket: str
    rows: int  # real rows, padding not counted
    drawn: int  # tokens drawn
    seconds: float
    running_by_home: tuple[int, ...]
    waiting: int
    pages_used: tuple[int, ...]
    pages_per_rank: int
    projection_bytes: int  # on every rank
    kv_bytes: int  # allocated on every rank
    transit_bytes: int  # kept free on every rank for one layer on the move
    idle_ranks: int  # ranks that own no row of this step, where requests have owners
    switch: SwitchPlan | None = None
    switch_mode: str | None = None  # how it was carried out
    layers_ahead: int = 0  # of a spread switch under way: layers that ran in its destination
