"""PartitionSpecs of everything a layout places, derived from its placements."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from splash_jax.errors import LayoutError
from splash_jax.layouts.registry import ROLES
from splash_jax.ownership import Layout

MOST_RANKS = 1024  # that an error proposes


def attention_mesh(sizes: dict[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the given axes over the first devices. Raises `LayoutError` when there are too few."""
    count = int(np.prod(list(sizes.values())))
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < count:
        raise LayoutError(
            f"mesh {sizes} needs {count} devices and {len(devices)} are there. On CPU set jax_num_cpu_devices (or "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}) before JAX starts, or ask for fewer."
        )
    grid = np.asarray(devices[:count]).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def weight_spec(layout: Layout, dims: tuple[str | None, ...]) -> P:
    """Spec of a weight whose dimensions are named: "heads" follows the layout, "ranks" is cut over all ranks."""
    places = {"heads": layout.head_axes or None, "ranks": layout.axis_names, None: None}
    return P(*(places[dim] for dim in dims))


def row_spec(layout: Layout) -> P:
    """Spec of rows [groups..., R, ...] between layers."""
    sharding = [a for a in layout.axes if a.name in layout.owner_axes]
    return P(*(a.name if ROLES[a.role].shards_rows else None for a in sharding))


def local_spec(layout: Layout) -> P:
    """Spec of per-rank data [T, ...]."""
    return P(layout.axis_names)


def pool_spec(layout: Layout) -> P:
    """Spec of one layer's pages [T, pages, page_size, width]: a slab per rank."""
    return P(layout.axis_names)


def check_heads(layout: Layout, num_heads: int) -> None:
    """Raise `LayoutError` unless the heads can be split over all ranks, as some layout may want."""
    if num_heads % layout.size:
        fits = [t for t in range(1, min(num_heads, MOST_RANKS) + 1) if num_heads % t == 0]
        raise LayoutError(
            f"{num_heads} attention heads cannot be split over {layout.size} devices; choose num_devices from {fits}."
        )
