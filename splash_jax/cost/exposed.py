"""What of a switch a step does not hide (arXiv 2609.37626, Eq. 7), and what it would be spread over several steps."""

from collections.abc import Sequence
from dataclasses import dataclass


def exposed_seconds(transfer: Sequence[float], compute: Sequence[float]) -> float:
    """Eq. 7: seconds that a switch inside one step adds to it.

    `transfer[i]` and `compute[i]` are the seconds of layer i's transfer and compute. The first transfer has nothing
    beside it and is exposed whole; layer i's hides behind the compute of layer i - 1, and only what outlasts it shows.
    """
    _check(transfer, compute)
    rest = zip(transfer[1:], compute[:-1], strict=True)
    return transfer[0] + sum(max(0.0, moving - computing) for moving, computing in rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A switch spread over several ordinary steps."""

    steps: int
    exposed_total: float  # seconds, all steps together
    exposed_worst: float  # seconds, the step that shows most


def spread_over_steps(transfer: Sequence[float], compute: Sequence[float], layers_per_step: int) -> Spread:
    """The same switch with `layers_per_step` layers' state moved in each of several ordinary steps.

    A layer's state moves, in parts, beside the compute of all layers but those that move with it: from when it has run
    in one step until it runs in the next. So a step shows what outlasts that compute. Parts are taken to be as fine as
    need be. The last parts arrive in one step more, which completes the switch.
    """
    _check(transfer, compute)
    if layers_per_step < 1:
        raise ValueError(f"layers_per_step must be at least 1, got {layers_per_step}.")
    groups = [slice(i, i + layers_per_step) for i in range(0, len(transfer), layers_per_step)]
    shown = [max(0.0, sum(transfer[group]) - (sum(compute) - sum(compute[group]))) for group in groups]
    return Spread(steps=len(groups) + 1, exposed_total=sum(shown), exposed_worst=max(shown))


def _check(transfer: Sequence[float], compute: Sequence[float]) -> None:
    if not transfer or len(transfer) != len(compute):
        raise ValueError(f"{len(transfer)} transfers and {len(compute)} computes: give one of each per layer.")
