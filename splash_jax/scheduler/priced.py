"""The cost model (`splash_jax.cost`) as the prices that a snapshot needs."""

import math
from collections.abc import Mapping

from splash_jax.cost import Load, StepModel, SwitchModel
from splash_jax.ownership import Layout
from splash_jax.scheduler.quotes import SwitchCost

PER_OCTAVE = 8


class ModelCosts:
    """A model served on a kind of hardware. With `spread`, switches over several steps are offered too.

    Switches are quoted for even loads on a grid of eighths of octaves, and kept: they change slowly.
    """

    def __init__(self, steps: StepModel, *, spread: bool = False) -> None:
        self.layouts, self._steps, self._switches, self._spread = steps.layouts, steps, SwitchModel(steps), spread
        self._quoted: dict[tuple[Layout, tuple[int, ...]], Mapping[Layout, SwitchCost]] = {}

    def step_seconds(self, load: Load) -> Mapping[Layout, float]:
        """Seconds of one step of this load in every layout."""
        return {layout: estimate.seconds for layout, estimate in self._steps.seconds(load).items()}

    def switch_seconds(self, src: Layout, load: Load) -> Mapping[Layout, SwitchCost]:
        """What a switch from `src` to every other layout adds: within one step of this load (Eq. 7), and spread."""
        means = len(load), load.context.mean(), load.new_rows.mean()
        key = (src, tuple(round(math.log2(mean) * PER_OCTAVE) for mean in means))
        if key not in self._quoted:
            batch, context, rows = (round(2 ** (place / PER_OCTAVE)) for place in key[1])
            even = Load.balanced(batch, max(context, rows), self._steps.ranks, rows)
            quotes = self._switches.quotes(src, even).items()
            self._quoted[key] = {
                dst: SwitchCost(float(q.exposed), float(q.spread.exposed_total), q.spread.steps)
                if self._spread
                else SwitchCost(float(q.exposed))
                for dst, q in quotes
            }
        return self._quoted[key]
