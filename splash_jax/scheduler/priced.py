"""The cost model (`splash_jax.cost`) as the prices that a snapshot needs."""

from collections.abc import Mapping

from splash_jax.cost import Load, StepModel, SwitchModel
from splash_jax.ownership import Layout
from splash_jax.scheduler.quotes import SwitchCost


class ModelCosts:
    """A model served on a kind of hardware. With `spread`, switches over several steps are offered too."""

    def __init__(self, steps: StepModel, *, spread: bool = False) -> None:
        self.layouts, self._steps, self._switches, self._spread = steps.layouts, steps, SwitchModel(steps), spread

    def step_seconds(self, load: Load) -> Mapping[Layout, float]:
        """Seconds of one step of this load in every layout."""
        return {layout: estimate.seconds for layout, estimate in self._steps.seconds(load).items()}

    def switch_seconds(self, src: Layout, load: Load) -> Mapping[Layout, SwitchCost]:
        """What a switch from `src` to every other layout adds: within one step of this load (Eq. 7), and spread."""
        quotes = self._switches.quotes(src, load).items()
        if not self._spread:
            return {dst: SwitchCost(quote.exposed) for dst, quote in quotes}
        return {dst: SwitchCost(q.exposed, q.spread.exposed_total, q.spread.steps) for dst, q in quotes}
