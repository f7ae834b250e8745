"""Measured step costs of several layouts as smooth functions of the load."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.interpolate import RBFInterpolator
from scipy.spatial import ConvexHull

from splash_jax.cost.tables import read_table
from splash_jax.errors import ConfigError

SURFACES = ("BxL", "B,L")  # over batch times context, or over both
SMOOTHING = 0.3
Relative = Callable[[np.ndarray, np.ndarray], np.ndarray]


def surface(table: Path, layouts: Sequence[str], over: str = "B,L") -> Relative:
    """Relative step costs fitted to measured throughput: of batch [..] and mean context [..] to costs [.., L].

    The mean over layouts is 1. Thin plates through the logs of seconds per token, lightly smoothed, and clipped to the
    hull of what was measured: outside it, the nearest measured load answers. `over` is one of `SURFACES`. `table` is
    what `cost.read_table` reads. Raises `ConfigError` for a file that is none, or lacks a layout.
    """
    measured = read_table(table)
    if missing := [name for name in layouts if name not in measured.layouts]:
        raise ConfigError(f"{table} has {', '.join(measured.layouts)}; it lacks {', '.join(missing)}. Leave these out.")
    where = np.log(np.stack([measured.inputs, measured.batches], 1).astype(float))
    costs = -np.log(measured.throughput[:, [measured.layouts.index(name) for name in layouts]])
    costs -= costs.mean(1, keepdims=True)
    if over == "BxL":
        where = where.sum(1, keepdims=True)
        low, high = where.min(0), where.max(0)

        def inside(points: np.ndarray) -> np.ndarray:
            return np.clip(points, low, high)
    else:
        hull = ConvexHull(where)

        def inside(points: np.ndarray) -> np.ndarray:
            return _into(hull, points)

    fit = RBFInterpolator(where, costs, kernel="thin_plate_spline", smoothing=SMOOTHING)

    def relative(batch: np.ndarray, context: np.ndarray) -> np.ndarray:
        points = np.stack([np.log(context), np.log(batch)], -1).reshape(-1, 2)
        if over == "BxL":
            points = points.sum(1, keepdims=True)
        found = np.exp(fit(inside(points)))
        return (found / found.mean(1, keepdims=True)).reshape(*np.shape(batch), len(layouts))

    return relative


def _into(hull: ConvexHull, points: np.ndarray) -> np.ndarray:
    """The nearest points of a convex polygon; points inside stay."""
    outside = (points @ hull.equations[:, :2].T + hull.equations[:, 2]).max(1) > 1e-12
    if not outside.any():
        return points
    start = hull.points[hull.vertices]
    along = np.roll(start, -1, 0) - start
    away = points[outside, None] - start
    part = np.clip((away * along).sum(-1) / (along**2).sum(-1), 0, 1)
    feet = start + part[..., None] * along
    nearest = ((points[outside, None] - feet) ** 2).sum(-1).argmin(1)
    found = points.copy()
    found[outside] = feet[np.arange(len(nearest)), nearest]
    return found
