"""Measured step costs of several layouts as smooth functions of the load."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.interpolate import RBFInterpolator
from scipy.spatial import ConvexHull

from splash_jax.errors import ConfigError

SURFACES = ("BxL", "B,L")  # over batch times context, or over both
SMOOTHING = 0.3
Relative = Callable[[np.ndarray, np.ndarray], np.ndarray]


def read_throughput(table: Path, layouts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Loads [N, 2] as (input length, batch) and throughput [N, L] of a CSV file with columns input_len, B and layouts.

    The tables 4 and 5 of arXiv 2609.37626 have this form. Raises `ConfigError` naming the file and what is wrong.
    """
    try:
        with table.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except OSError as error:
        raise ConfigError(f"{table} cannot be read: {error.strerror}.") from error
    needed = ("input_len", "B", *layouts)
    if not rows or (missing := [name for name in needed if name not in rows[0]]):
        lacking = ", ".join(needed if not rows else missing)
        raise ConfigError(f"{table} has no column {lacking}; a table of throughput has input_len, B and every layout.")
    try:
        values = np.array([[float(row[name]) for name in needed] for row in rows])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{table} has an entry that is no number: {error}.") from error
    if not (values > 0).all() or not np.isfinite(values).all():
        raise ConfigError(f"{table} has an entry that is not above 0; lengths, batches and throughputs are.")
    return values[:, :2], values[:, 2:]


def surface(table: Path, layouts: Sequence[str], over: str = "B,L") -> Relative:
    """Relative step costs fitted to measured throughput: of batch [..] and mean context [..] to costs [.., L].

    The mean over layouts is 1. Thin plates through the logs of seconds per token, lightly smoothed, and clipped to the
    hull of what was measured: outside it, the nearest measured load answers. `over` is one of `SURFACES`.
    """
    loads, throughput = read_throughput(table, layouts)
    where, costs = np.log(loads), -np.log(throughput)
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
