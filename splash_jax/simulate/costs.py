"""A clock of a simulation: what a step and a switch take, from measured tables.

It is a `splash_jax.scheduler.Costs` as the cost model's is, so the policy and the clock ask the same question.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from splash_jax.cost import Load
from splash_jax.errors import ConfigError
from splash_jax.ownership import Layout
from splash_jax.scheduler import SwitchCost
from splash_jax.simulate.surface import surface

PER_OCTAVE = 8
BATCHES = np.arange(0, 13 * PER_OCTAVE + 1)  # batches of 1 to 8,192
CONTEXTS = np.arange(5 * PER_OCTAVE, 24 * PER_OCTAVE + 1)  # contexts of 32 to 16 M tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TableScale:
    """What a table of relative costs leaves open. Seconds, means over the layouts."""

    decode_step: float = 0.035  # a step that draws a token of every request
    prompt_row: float = 2.2 / 32768  # further, for every prompt row
    switch: float = 0.01  # added by a switch, in any direction


class TableCosts:
    """Measured throughput of fixed layouts (arXiv 2609.37626, Table 4 or 5) as relative costs of a step.

    The table says how layouts compare at a batch and a mean context; `TableScale` what a step takes on average. Costs
    are interpolated on a grid of eighths of octaves.
    """

    def __init__(self, table: Path, layouts: Sequence[Layout], scale: TableScale | None = None) -> None:
        self.layouts, self.scale = tuple(layouts), scale or TableScale()
        for name in TableScale.__slots__:
            if not 0 <= getattr(self.scale, name) < np.inf or self.scale.decode_step == 0:
                raise ConfigError(f"{name} is {getattr(self.scale, name)} s; give seconds, decode_step above 0.")
        relative = surface(table, [str(one) for one in self.layouts])
        grid = np.meshgrid(2 ** (BATCHES / PER_OCTAVE), 2 ** (CONTEXTS / PER_OCTAVE), indexing="ij")
        self._grid = np.log(relative(*grid))  # [batches, contexts, L]
        self._switch = {
            src: {dst: SwitchCost(self.scale.switch) for dst in self.layouts if dst != src} for src in self.layouts
        }

    def step_seconds(self, load: Load) -> Mapping[Layout, float]:
        """Seconds of one step of this load in every layout; the table has no word on how owners are balanced."""
        if not len(load):
            return dict.fromkeys(self.layouts, 0.0)
        rows = int(load.new_rows.sum())
        draws = int((load.new_rows == 1).sum())
        prompt = rows - draws
        mean = self.scale.decode_step * (draws > 0) + self.scale.prompt_row * prompt
        relative = self._relative(len(load), float(load.context.mean()))
        return dict(zip(self.layouts, (relative * mean).tolist(), strict=True))

    def switch_seconds(self, src: Layout, load: Load) -> Mapping[Layout, SwitchCost]:
        """What a switch from `src` to every other layout adds: the same, always."""
        return self._switch[src]

    def _relative(self, batch: float, context: float) -> np.ndarray:
        x = min(max(np.log2(batch) * PER_OCTAVE - BATCHES[0], 0.0), len(BATCHES) - 1.001)
        y = min(max(np.log2(context) * PER_OCTAVE - CONTEXTS[0], 0.0), len(CONTEXTS) - 1.001)
        i, j = int(x), int(y)
        u, v = x - i, y - j
        g = self._grid
        low = g[i, j] * (1 - v) + g[i, j + 1] * v
        high = g[i + 1, j] * (1 - v) + g[i + 1, j + 1] * v
        return np.exp(low * (1 - u) + high * u)
