"""Who holds what under a layout, and what a switch must move. Pure Python and numpy."""

from splash_jax.ownership.bucket import Bucket, switch_buckets
from splash_jax.ownership.footprint import Footprint, StateBytes, footprint, pages_that_fit
from splash_jax.ownership.layout import Axis, History, Layout, Placement, Projections, groups_of_ranks, lags_of_holders
from splash_jax.ownership.manifest import KVShape, Manifest, RequestPages
from splash_jax.ownership.plan import KVMove, SwitchPlan, WeightMove, apply, plan_between, plan_switch
from splash_jax.ownership.travel import free_axes

__all__ = [
    "Axis",
    "Bucket",
    "Footprint",
    "History",
    "KVMove",
    "KVShape",
    "Layout",
    "Manifest",
    "Placement",
    "Projections",
    "RequestPages",
    "StateBytes",
    "SwitchPlan",
    "WeightMove",
    "apply",
    "footprint",
    "free_axes",
    "groups_of_ranks",
    "lags_of_holders",
    "pages_that_fit",
    "plan_between",
    "plan_switch",
    "switch_buckets",
]
