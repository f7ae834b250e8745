"""A small group: four ranks, four layouts whose steps and rooms differ, and a clock that can be worked out by hand."""

from collections.abc import Mapping

import pytest

from splash_jax.cost import Load
from splash_jax.layouts import make_layout
from splash_jax.ownership import KVShape, Layout, StateBytes
from splash_jax.scheduler import SwitchCost
from splash_jax.simulate import Deployment, buckets_of

ROLES = ("tp", "cp", "dp", "dop")
RANKS = 4


class HandCosts:
    """Few requests want the first layout, many the last; steps grow with histories, a switch costs always the same."""

    def __init__(self, layouts: tuple[Layout, ...], switch: float) -> None:
        self.layouts, self.switch = layouts, switch

    def step_seconds(self, load: Load) -> Mapping[Layout, float]:
        rows, tokens = int(load.new_rows.sum()), int(load.context.sum())
        last = len(self.layouts) - 1
        return {
            one: 1e-3 + 2e-4 * i + 1e-4 * rows * (last - i + 1) + 1e-7 * tokens * (last - i + 1)
            for i, one in enumerate(self.layouts)
        }

    def switch_seconds(self, src: Layout, load: Load) -> Mapping[Layout, SwitchCost]:
        return {one: SwitchCost(self.switch) for one in self.layouts if one != src}


def make_deployment(pages: int = 400, every: int = 16, switch: float = 2e-3, slots: int = 32) -> Deployment:
    layouts = tuple(make_layout(role, {"rank": RANKS}) for role in ROLES)
    return Deployment(
        layouts=layouts,
        pages=dict.fromkeys(layouts, pages),
        kv=KVShape(page_size=16, interleave=16, bytes_per_token=8),
        state=StateBytes(projections=1000, common=0, kv_per_token=8, num_layers=3),
        buckets=buckets_of(layouts, slots, 128, 16),
        slots=slots,
        costs=HandCosts(layouts, switch),
        every=every,
    )


@pytest.fixture
def deployment() -> Deployment:
    return make_deployment()
