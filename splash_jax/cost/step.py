"""Seconds of a step under every layout, from its load and hardware constants (arXiv 2609.37626, Eq. 10 and Table 2).

    t = t0 + sum over stages of max(FLOPs / rate, bytes / bandwidth) + messages x latency + bytes received / bandwidth

of the busiest rank: every layer's collectives wait for it. Nothing of an exchange is hidden (the eta of Eq. 10 is 0):
a program of one step has no second batch to compute meanwhile. Beside it stand the floor (the largest resource alone)
and the ceiling (all resources one after another): a measurement outside them says which constant is wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from splash_jax.cost.hardware import Hardware
from splash_jax.cost.load import Load
from splash_jax.cost.served import ServedModel
from splash_jax.cost.work import LOADS, Stage, end_stages, layer_stages, touched_experts
from splash_jax.errors import RequestError
from splash_jax.ownership import Bucket, Layout

RESOURCES = ("hbm", "flops", "network", "messages", "overhead")


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """One step in one layout. Seconds."""

    seconds: float
    floor: float  # the largest of `terms`
    ceiling: float  # all of them
    terms: Mapping[str, float]  # seconds of each of RESOURCES on the busiest rank, all stages together

    @property
    def bound(self) -> str:
        """The resource that takes longest."""
        return max(self.terms, key=self.terms.__getitem__)


class StepModel:
    """A model on a kind of hardware: prices a load in several layouts of one mesh at once.

    With `buckets`, a step is padded as the engine's programs are: to the smallest bucket that holds it. Without, to
    the rows of the fullest owner group.
    """

    def __init__(
        self,
        model: ServedModel,
        layouts: Sequence[Layout],
        hardware: Hardware,
        buckets: Mapping[Layout, Sequence[Bucket]] | None = None,
    ) -> None:
        self.model, self.layouts, self.hardware, self.buckets = model, tuple(layouts), hardware, buckets
        if not self.layouts or len({one.axis_names for one in self.layouts} | {one.size for one in self.layouts}) > 2:
            raise ValueError(f"layouts {[str(one) for one in self.layouts]} are not of one mesh.")
        self.ranks = self.layouts[0].size
        self._groupings = {one.owner_axes: one for one in self.layouts}
        order = list(self._groupings)
        self._grouping = np.array([order.index(one.owner_axes) for one in self.layouts])
        self._owned = np.stack([owned_homes(one) for one in self._groupings.values()])  # [groupings, groups, homes]
        self._stages = [_weighed(model, one) for one in self.layouts]
        self._counts = np.stack(
            [self._in_seconds(one, stages) for one, stages in zip(self.layouts, self._stages, strict=True)]
        )
        self._sums = _sums(len(self._stages[0]))
        self._per_layer = _per_layer(model, self._stages[0])
        messages = np.array([[sum(n * len(stage.messages) for n, stage in stages)] for stages in self._stages])
        idle = np.array([0, 0, 0, 0, hardware.step_overhead_s])
        self._constant = messages * hardware.message_latency_s * (np.arange(5) == RESOURCES.index("messages")) + idle

    def seconds(self, load: Load) -> dict[Layout, StepEstimate]:
        """An estimate of one step for each layout. Raises RequestError for a home that no rank has."""
        staged = (self._counts @ self._loads(load)[..., None])[..., 0]  # [layouts, flops | bytes | received]
        terms = staged @ self._sums + self._constant
        n = len(self._stages[0])
        seconds = np.maximum(staged[:, :n], staged[:, n : 2 * n]).sum(1) + terms[:, 2:].sum(1)
        return {
            layout: StepEstimate(total, max(row), sum(row), dict(zip(RESOURCES, row, strict=True)))
            for layout, total, row in zip(self.layouts, seconds.tolist(), terms.tolist(), strict=True)
        }

    def layer_seconds(self, load: Load) -> np.ndarray:
        """Seconds of compute of each layer, exchanges left out: the links are busy then. f64[layouts, layers].

        What a transfer of Eq. 7 can hide behind.
        """
        staged, n = (self._counts @ self._loads(load)[..., None])[..., 0], len(self._stages[0])
        return np.maximum(staged[:, :n], staged[:, n : 2 * n]) @ self._per_layer

    def _in_seconds(self, layout: Layout, stages: "list[tuple[int, Stage]]") -> np.ndarray:
        """Seconds per unit of each load: of every stage's FLOPs, of its bytes, and of all bytes received."""
        hardware = self.hardware
        share = layout.size if hardware.ranks_share_device else 1
        rows = []
        for what, rate, own in (
            ("flops", hardware.bf16_flops_per_s, hardware.attention_rate),
            ("hbm_bytes", hardware.hbm_bytes_per_s, hardware.kv_rate),
        ):
            for count, stage in stages:
                # Loads of attention are of the fullest group; on a shared device, of all: a group's ranks do them each.
                times = share / layout.owner_groups if stage.attention and share > 1 else share
                counts = getattr(stage, what)
                scale = times * count / (own if stage.attention else rate)
                rows.append([scale * counts.get(name, 0.0) for name in LOADS])
        received: dict[str, float] = dict.fromkeys(LOADS, 0.0)
        for count, stage in stages:
            received[stage.per] += share * count * sum(m.received for m in stage.messages)
        rows.append([received[name] / hardware.interconnect_bytes_per_s for name in LOADS])
        return np.array(rows)

    def _loads(self, load: Load) -> np.ndarray:
        """What the busiest rank has in each layout. f64[layouts, LOADS]."""
        homes = load.by_home(self.ranks)
        if len(homes) > self.ranks:
            raise RequestError(
                f"a request is at home on rank {len(homes) - 1}, and the ranks are 0 to {self.ranks - 1}."
            )
        every = homes.sum(0)
        groups = self._owned @ homes  # [groupings, groups, 4]
        fullest = groups.max(1)
        if self.hardware.ranks_share_device:
            fullest[:, 2:] = every[2:]
        F = np.empty((len(self.layouts), len(LOADS)))
        F[:, 0] = 1
        F[:, [1, 2, 4, 5]] = fullest[self._grouping]
        F[:, 3] = every[0]
        F[:, 6] = touched_experts(self.model, every[0])
        if self.buckets is not None:
            self._pad(F, load)
        return F

    def _pad(self, F: np.ndarray, load: Load) -> None:
        """Rows and drawn rows of the bucket that holds the step, where one does."""
        assert self.buckets is not None
        for i, layout in enumerate(self.layouts):
            buckets = self.buckets[layout]
            tile = buckets[-1].tile
            single = load.new_rows == 1
            each = np.stack([single, np.where(single, 0, -(-load.new_rows // tile))])
            homes = np.stack([np.bincount(load.home, one, self.ranks) for one in each], 1)
            decode, tiles = (self._owned[self._grouping[i]] @ homes).max(0)
            fits = (b for b in buckets if b.decode >= decode and b.tiles >= tiles)
            bucket = next(fits, buckets[-1])
            F[i, 1], F[i, 2] = bucket.rows, bucket.sequences


def estimate_step(model: ServedModel, layout: Layout, load: Load, hardware: Hardware) -> StepEstimate:
    """The estimate of one step in one layout. For many steps, keep a `StepModel`."""
    return StepModel(model, [layout], hardware).seconds(load)[layout]


ATTENTION = ("projections", "kernel")


def owned_homes(layout: Layout) -> np.ndarray:
    """Which homes each owner group serves, padded with empty groups. f64[T, T]."""
    owned = np.zeros((layout.size, layout.size))
    for home in range(layout.size):
        owned[layout.group_of(home), home] = 1
    return owned


def _weighed(model: ServedModel, layout: Layout) -> list[tuple[int, Stage]]:
    """Every stage of a step and how often it runs."""
    found: list[tuple[int, Stage]] = []
    for kind, count in model.kinds.items():
        for stage in layer_stages(model, layout, kind):
            shared = stage.name in ATTENTION
            if not shared:
                found.append((count, stage))
            elif all(other.name != stage.name for _, other in found):
                found.append((model.sizes.num_layers, stage))
    return [*found, *((1, stage) for stage in end_stages(model, layout))]


def _sums(stages: int) -> np.ndarray:
    """What adds up stages' FLOPs, bytes and received bytes into RESOURCES. f64[2 stages + 1, RESOURCES]."""
    sums = np.zeros((2 * stages + 1, len(RESOURCES)))
    sums[:stages, RESOURCES.index("flops")] = 1
    sums[stages:-1, RESOURCES.index("hbm")] = 1
    sums[-1, RESOURCES.index("network")] = 1
    return sums


def _per_layer(model: ServedModel, stages: "list[tuple[int, Stage]]") -> np.ndarray:
    """What gives every layer its part of all layers' stages. f64[stages, layers]."""
    kinds = [kind for kind, count in model.kinds.items() for _ in range(count)]
    own = {"dense": (*ATTENTION, "mlp"), "moe": (*ATTENTION, "experts")}
    return np.array([[(stage.name in own[kind]) / count for kind in kinds] for count, stage in stages])
