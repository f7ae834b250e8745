"""The cost model (`splash_jax.cost`) as the prices that a snapshot needs."""

import math
from collections.abc import Collection, Mapping

from splash_jax.cost import Load, StepModel, SwitchModel, SwitchQuote, spread_over_steps
from splash_jax.errors import PolicyError
from splash_jax.ownership import Layout
from splash_jax.scheduler.quotes import SwitchCost

PER_OCTAVE = 8
AT_ONCE = ("splash", "blocking")  # ways to switch within one step, the better one first
SPREAD = "spread"


class ModelCosts:
    """A model served on a kind of hardware.

    Switches are quoted for even loads on a grid of eighths of octaves, and kept: they change slowly.
    """

    def __init__(self, steps: StepModel, *, modes: Collection[str] = AT_ONCE, spread_layers: int = 1) -> None:
        """`modes` are the ways to switch that are offered (`splash_jax.runtime.SwitchMode`): within one step the better
        one, and spread over steps with `spread_layers` layers in each. Raises `PolicyError` where none is known.
        """
        self.at_once = next((mode for mode in AT_ONCE if mode in modes), None)
        self._spread_layers = spread_layers if SPREAD in modes else None
        if self.at_once is None and self._spread_layers is None:
            raise PolicyError(f"modes {tuple(modes)!r} offer no switch; give some of {', '.join((*AT_ONCE, SPREAD))}.")
        self.layouts, self._steps, self._switches = steps.layouts, steps, SwitchModel(steps)
        self._quoted: dict[tuple[Layout, tuple[int | None, ...]], Mapping[Layout, SwitchCost]] = {}

    def step_seconds(self, load: Load) -> Mapping[Layout, float]:
        """Seconds of one step of this load in every layout."""
        return {layout: estimate.seconds for layout, estimate in self._steps.seconds(load).items()}

    def switch_seconds(self, src: Layout, load: Load) -> Mapping[Layout, SwitchCost]:
        """What a switch from `src` to every other layout adds: within one step of this load (Eq. 7), and spread.

        Of a load of nothing, what moves the projections.
        """
        batch = len(load)
        means = batch, load.context.sum() / max(1, batch), load.new_rows.sum() / max(1, batch)
        key = (src, tuple(_place(mean) for mean in means))
        if key not in self._quoted:
            batch, context, rows = (0 if place is None else round(2 ** (place / PER_OCTAVE)) for place in key[1])
            even = Load.balanced(batch, max(context, rows), self._steps.ranks, rows)
            compute = self._steps.layer_seconds(even)[self.layouts.index(src)].tolist()
            quotes = self._switches.quotes(src, even)
            self._quoted[key] = {dst: self._cost(quote, compute) for dst, quote in quotes.items()}
        return self._quoted[key]

    def _cost(self, quote: SwitchQuote, compute: list[float]) -> SwitchCost:
        one = {"splash": quote.exposed, "blocking": quote.blocking, None: None}[self.at_once]
        one_step = None if one is None else float(one)
        if self._spread_layers is None:
            return SwitchCost(one_step)
        spread = spread_over_steps([quote.transfer] * len(compute), compute, self._spread_layers)
        return SwitchCost(one_step, float(spread.exposed_total), spread.steps)


def _place(mean: float) -> int | None:
    """Where on the grid; None for 0."""
    return None if mean <= 0 else round(math.log2(mean) * PER_OCTAVE)
