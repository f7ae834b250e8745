"""What a switch moves and how much of that shows (arXiv 2609.37626, Eq. 2, 3 and 7), for loads as arrays.

The plan of a switch (`splash_jax.ownership.plan_switch`) lists every page; this counts bytes only, in microseconds, so
that a scheduler may ask in every step. Histories are counted to the token, their pages' last places not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from splash_jax.cost.exposed import Spread, exposed_seconds, spread_over_steps
from splash_jax.cost.hardware import Hardware
from splash_jax.cost.load import Load
from splash_jax.cost.roofline import transfer_seconds
from splash_jax.cost.served import ServedModel
from splash_jax.cost.step import StepModel
from splash_jax.ownership import Layout, StateBytes
from splash_jax.ownership.plan import weight_move


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchQuote:
    """One switch of a live batch. Bytes are received by the busiest rank for one layer; times in seconds."""

    weight_bytes: int
    kv_bytes: float
    transfer: float  # of one layer
    blocking: float  # all layers' transfers, nothing beside them
    exposed: float  # Eq. 7: what a switch inside the given step adds to it
    spread: Spread  # over several such steps, as few layers in each as shows least
    layers_per_step: int  # of `spread`; 0 where nothing has to move

    @property
    def cheapest(self) -> float:
        """Seconds that the cheaper of one step and of several shows."""
        return min(self.exposed, self.spread.exposed_total)


# Of the layout that a batch is in already: no step is needed.
NO_SWITCH = SwitchQuote(
    weight_bytes=0, kv_bytes=0.0, transfer=0.0, blocking=0.0, exposed=0.0,
    spread=Spread(steps=0, exposed_total=0.0, exposed_worst=0.0), layers_per_step=0,
)  # fmt: skip


class SwitchModel:
    """Quotes of every switch between some layouts of one mesh."""

    def __init__(self, steps: StepModel) -> None:
        self.steps, model = steps, steps.model
        state = projection_state(model)
        self._weights = {
            (src, dst): weight_move(src, dst, state).bytes_per_rank for src, dst in permutations(steps.layouts, 2)
        }
        self._lacking = {(src, dst): lacking(src, dst) for src, dst in permutations(steps.layouts, 2)}

    def quotes(self, src: Layout, load: Load) -> dict[Layout, SwitchQuote]:
        """What a switch to every other layout costs if it happens inside a step of this load.

        One step runs in the destination, and hides a layer's transfer behind the layer before; spread, a layer's state
        moves beside whole steps, most of which run in the source.
        """
        model, hardware, layouts = self.steps.model, self.steps.hardware, self.steps.layouts
        if src not in layouts:
            raise ValueError(f"a switch from {src} is not quoted among {', '.join(map(str, layouts))}: name it, too.")
        live = np.bincount(load.home, load.context - load.new_rows, self.steps.ranks)  # before the step adds its rows
        compute = dict(zip(layouts, self.steps.layer_seconds(load).tolist(), strict=True))
        shared = hardware.ranks_share_device
        found = {}
        for dst in layouts:
            if dst == src:
                continue
            received = live @ self._lacking[src, dst] * model.kv_bytes_per_token
            kv, weights = float(received.max()), self._weights[src, dst]
            through = weights * self.steps.ranks + received.sum() if shared else weights + kv
            one = transfer_seconds(through, (weights > 0) + (kv > 0), hardware)
            moving = [one] * model.sizes.num_layers
            per_step, spread = cheapest_spread(moving, compute[src])
            found[dst] = SwitchQuote(
                weight_bytes=weights, kv_bytes=kv, transfer=one, blocking=sum(moving),
                exposed=exposed_seconds(moving, compute[dst]), spread=spread, layers_per_step=per_step,
            )  # fmt: skip
        return found


def quote_switch(model: ServedModel, src: Layout, dst: Layout, load: Load, hardware: Hardware) -> SwitchQuote:
    """The quote of one switch, `NO_SWITCH` where `dst` is `src`. For many, keep a `SwitchModel`."""
    if src == dst:
        return NO_SWITCH
    return SwitchModel(StepModel(model, [src, dst], hardware)).quotes(src, load)[dst]


def cheapest_spread(moving: Sequence[float], compute: Sequence[float]) -> tuple[int, Spread]:
    """Layers per step, and the spread, of all spreads the one that exposes least; of equal ones, of fewest steps.

    One layer per step exposes least: what two groups show together, one of both shows at least. Where that is nothing,
    larger groups are tried, from the largest that one step's compute could hide.
    """
    alone = spread_over_steps(moving, compute, 1)
    if alone.exposed_total > 0:
        return 1, alone
    least = min(map(float.__add__, map(float, moving), map(float, compute)))
    total, count = sum(compute), len(moving)
    most = count if least * count <= total else int(total / least) + 1
    for k in range(min(most, count), 1, -1):
        spread = spread_over_steps(moving, compute, k)
        if spread.exposed_total == 0:
            return k, spread
    return 1, alone


def projection_state(model: ServedModel) -> StateBytes:
    """A model's state without what no switch moves."""
    return StateBytes(
        projections=math.ceil(model.placed_projection_weights * model.weight_bytes),
        common=0,
        kv_per_token=model.kv_bytes_per_token,
        num_layers=model.sizes.num_layers,
    )


def lacking(src: Layout, dst: Layout) -> np.ndarray:
    """Share of a history at home on each rank that each rank lacks (Eq. 2). f64[homes, ranks]."""
    shares = src.position_shares, dst.position_shares
    every = math.lcm(*shares)
    blocks = np.arange(every)
    both = np.zeros(np.add(shares, 1))  # blocks that a rank has and wants, by its lags; none in the last row and column
    np.add.at(both, (blocks % shares[0], blocks % shares[1]), 1)
    have, want = _lags(src), _lags(dst)
    return np.where(want < 0, 0, every // shares[1] - both[have, want]) / every


def _lags(layout: Layout) -> np.ndarray:
    """Which of consecutive blocks of a history's positions each rank holds, as its lag; -1: none. i64[homes, ranks]."""
    group, share = (np.array([of(rank) for rank in range(layout.size)]) for of in (layout.group_of, layout.share_of))
    lags = (share[None] - share[:, None]) % layout.position_shares
    return np.where(group[None] == group[:, None], lags, -1)
