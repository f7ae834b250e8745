"""Traffic against a clock instead of devices: the same scheduler, pool and policy. No jax."""

from splash_jax.simulate import traffic
from splash_jax.simulate.compare import Row, Way, by_thresholds, compare, layout_named, run_one, ways_of
from splash_jax.simulate.costs import TableCosts, TableScale
from splash_jax.simulate.group import Deployment, Group, Outcome, Stretch, buckets_of
from splash_jax.simulate.optimum import hindsight
from splash_jax.simulate.traffic import Traffic

__all__ = [
    "Deployment",
    "Group",
    "Outcome",
    "Row",
    "Stretch",
    "TableCosts",
    "TableScale",
    "Traffic",
    "Way",
    "buckets_of",
    "by_thresholds",
    "compare",
    "hindsight",
    "layout_named",
    "run_one",
    "traffic",
    "ways_of",
]
