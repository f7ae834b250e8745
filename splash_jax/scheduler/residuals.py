"""Measured over predicted step times: bounded factors that correct the estimates while serving.

A layout that has not run yet is corrected by what all layouts have in common (a slow clock, a slower memory). A factor
never leaves its bounds; a profile that would need more is reported instead of being obeyed.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from splash_jax.errors import PolicyError

log = logging.getLogger(__name__)

MOST = 2.0  # largest factor of a correction; estimates are divided by as much at most
FAR = 3.0  # a mean ratio beyond this, either way, and the profile is not to be obeyed
MEMORY = 64  # steps that a mean is over, once there are so many
TRUST = 16  # steps after which a layout's own mean counts as much as the common one
ENOUGH = 32  # steps before a profile is judged


@dataclass(frozen=True, slots=True)
class Seen:
    """Steps measured, and the mean of log(measured / predicted)."""

    steps: int = 0
    mean: float = 0.0

    def with_one(self, ratio: float) -> "Seen":
        steps = min(self.steps + 1, MEMORY)
        return Seen(steps, self.mean + (ratio - self.mean) / steps)


@dataclass(frozen=True, slots=True)
class Residuals:
    """What steps have measured so far, as plain data: `observe` returns it anew."""

    common: Seen = field(default_factory=Seen)
    own: Mapping[str, Seen] = field(default_factory=dict)  # "layout/kind" -> beside it

    def observe(self, layout: str, kind: str, predicted: float, measured: float) -> "Residuals":
        """With one more step; both in seconds. Raises `PolicyError` for times that no step takes."""
        if not (0 < predicted < math.inf and 0 < measured < math.inf):
            raise PolicyError(
                f"a step in {layout} was predicted {predicted} s and measured {measured} s; give seconds."
            )
        ratio = min(max(math.log(measured / predicted), -5.0), 5.0)  # one wild step is no evidence
        key = f"{layout}/{kind}"
        own = self.own.get(key, Seen())
        made = Residuals(self.common.with_one(ratio), {**self.own, key: own.with_one(ratio)})
        if made.distrust() and not self.distrust():
            log.warning("%s", made.distrust())
        return made

    def factor(self, layout: str, kind: str) -> float:
        """What to multiply an estimate by: between 1 / MOST and MOST."""
        own = self.own.get(f"{layout}/{kind}", Seen())
        weight = own.steps / (own.steps + TRUST)
        mean = weight * own.mean + (1 - weight) * self.common.mean
        return min(max(math.exp(mean), 1 / MOST), MOST)

    def distrust(self) -> str:
        """Why the profile is not to be obeyed: which layout is how far off and what to do; "" while it may be."""
        for key, seen in self.own.items():
            if seen.steps >= ENOUGH and abs(seen.mean) > math.log(FAR):
                layout, _, kind = key.partition("/")
                return (
                    f"{kind} steps in {layout} take {math.exp(seen.mean):.2g} times what the hardware profile predicts "
                    f"(mean of {seen.steps}); calibrate, or choose the profile of this machine."
                )
        return ""
