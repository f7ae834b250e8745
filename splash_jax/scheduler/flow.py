"""Prompts on their way in: how many begin per step, and so what part of the steps computes how many of their rows.

A snapshot is taken before a step admits anything, so it shows rows that draw and hardly ever a prompt. Where requests
come and go, prompts are a part of the work all the same, and layouts differ in it.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

STEPS = 64  # that the rate is smoothed over


class PromptSteps(NamedTuple):
    """Every `share`-th part of the steps has `prompts` prompts with `rows` rows each."""

    share: float
    prompts: int
    rows: int
    busy: float  # requests that are with their prompts and draw nothing, in the mean over all steps


@dataclass(frozen=True, slots=True)
class Flow:
    """Prompts per step and the rows of one, smoothed."""

    rate: float | None = None  # None: nothing was seen yet
    rows: float = 0.0
    pause: int = 0  # steps since a prompt began

    def after(self, steps: int, prompts: int, rows: int) -> "Flow":
        """With so many further steps, in which so many prompts began, of so many rows together."""
        new = 1.0 if self.rate is None else -math.expm1(-steps / STEPS)
        rate = (1 - new) * (self.rate or 0.0) + new * prompts / steps
        if not prompts:
            return Flow(rate, self.rows, self.pause + steps)
        mean = rows / prompts
        return Flow(rate, mean if not self.rows else (1 - new) * self.rows + new * mean, 0)

    def steps(self, room: int, most: int) -> PromptSteps | None:
        """The steps with prompt rows to expect; None without any.

        A burst that is over is no flow: for n steps without a prompt there is at most one in n.

        Args:
          room: rows of one prompt that a step has room for.
          most: ... and of all prompts.
        """
        rate = (self.rate or 0.0) if not self.pause else min(self.rate or 0.0, 1 / self.pause)
        if rate < 1e-6 or self.rows < 1:
            return None
        pieces = math.ceil(self.rows / room)
        rows = math.ceil(self.rows / pieces)
        prompts = max(1, min(round(rate * pieces), most // rows))
        return PromptSteps(min(1.0, rate * pieces / prompts), prompts, rows, rate * pieces)  # Little's law
