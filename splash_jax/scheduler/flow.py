"""Prompts on their way in: how many begin for each token drawn, and what that adds to the steps of a layout.

A snapshot is taken before a step admits anything, so it shows rows that draw, and of prompts at most what is left of
them. Where requests come and go prompts are a part of the work all the same, and layouts differ in it.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

STEPS = 64  # that counts are smoothed over
FADED = 1e-4  # prompts that count no more


class PromptSteps(NamedTuple):
    """Of every step a part `weight` has `rows` rows of some prompts; more than 1: it takes several.

    `contexts` are the tokens that the last row of each sees: they stand at different places of their prompts.
    """

    weight: float
    rows: int
    contexts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Flow:
    """Prompts that began, their rows, and tokens drawn: sums over the latest steps, older ones fading."""

    prompts: float = 0.0
    rows: float = 0.0
    draws: float = 0.0
    since: int = 0  # tokens drawn since a prompt began

    def after(self, steps: int, prompts: int, rows: int, draws: int) -> "Flow":
        """With so many further steps, and what began and was drawn in them."""
        old = math.exp(-steps / STEPS)
        return Flow(
            old * self.prompts + prompts,
            old * self.rows + rows,
            old * self.draws + draws,
            0 if prompts else self.since + draws,
        )

    @property
    def per_token(self) -> float:
        """Prompts for each token drawn, of which each has one at least.

        A burst that is over is no flow: after n tokens without one, at most one in n.
        """
        if self.prompts < FADED:
            return 0.0
        return self.prompts / max(self.draws, self.prompts * max(1, self.since))

    def steps(self, batch: int, room: int, groups: int) -> PromptSteps | None:
        """What prompts add to the steps of a layout in which `batch` requests run; None without any.

        Args:
          room: rows of one prompt that a step has room for: those of one group of owners.
          groups: of owners, that compute prompts side by side.
        """
        per_token = self.per_token
        if per_token * batch < FADED:
            return None
        mean = max(1, round(self.rows / self.prompts))
        pieces = -(-mean // room)
        rows = -(-mean // pieces)
        of_draws = per_token * pieces  # a request's steps with prompt rows over those in which it draws
        at_once = batch * of_draws / (1 + of_draws)
        apart = groups * (1 - (1 - 1 / groups) ** at_once)  # groups that have one, where homes fall by chance
        prompts = max(1, round(min(at_once, apart if groups > 1 else room // rows)))
        places = (min(pieces, max(1.0, pieces * (i + 0.5) / prompts + 0.5)) for i in range(prompts))
        contexts = tuple(round(rows * place) for place in places)
        return PromptSteps(per_token * batch * pieces / prompts, rows, contexts)
