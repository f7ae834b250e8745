"""Every role an axis can play. To add one: write its file, add its line."""

import math
from collections.abc import Mapping

from splash_jax.errors import LayoutError
from splash_jax.layouts.cp import ContextParallel
from splash_jax.layouts.dcp import DecodeContextParallel
from splash_jax.layouts.dop import DecoupledOwnership
from splash_jax.layouts.dp import DataParallel
from splash_jax.layouts.rep import Replicated
from splash_jax.layouts.role import AbstractRole
from splash_jax.layouts.tp import TensorParallel
from splash_jax.ownership import Axis, Layout

ROLES: dict[str, AbstractRole] = {
    role.name: role
    for role in (
        TensorParallel(),
        DataParallel(),
        ContextParallel(),
        DecoupledOwnership(),
        DecodeContextParallel(),
        Replicated(),
    )
}

MOST_AXES, MOST_RANKS = 16, 1024  # of a mesh


def make_layout(roles: str | Mapping[str, str] | Layout, mesh_shape: Mapping[str, int]) -> Layout:
    """The layout that gives each axis of `mesh_shape` (name -> size) its role.

    `roles` is a role's name (every axis plays it), a mapping axis -> role, the text "node=dop,chip=cp", or a layout,
    which must be of the same mesh. Raises `LayoutError` for a name that is not known, and for a mesh of more than
    MOST_AXES axes or MOST_RANKS ranks.
    """
    if len(mesh_shape) > MOST_AXES or math.prod(mesh_shape.values()) > MOST_RANKS:
        raise LayoutError(
            f"a mesh has at most {MOST_AXES} axes and {MOST_RANKS} ranks, not {len(mesh_shape)} and "
            f"{math.prod(mesh_shape.values())}; give fewer num_devices, or leave axes of size 1 out."
        )
    if isinstance(roles, Layout):
        if {axis.name: axis.size for axis in roles.axes} != dict(mesh_shape):
            raise LayoutError(f"layout {roles} is of another mesh than {dict(mesh_shape)}.")
        return roles
    if not isinstance(roles, str | Mapping):
        raise LayoutError(f"unknown layout {roles!r}; choose one of {', '.join(ROLES)}.")
    by_axis = _parse(roles, mesh_shape)
    if set(by_axis) != set(mesh_shape):
        raise LayoutError(f"layout {roles!r} names axes {sorted(by_axis)}; the mesh has {list(mesh_shape)}.")
    for axis, role in by_axis.items():
        if role not in ROLES:
            where = "" if role == roles else f" for axis {axis!r}"
            raise LayoutError(f"unknown layout {role!r}{where}; choose one of {', '.join(ROLES)}.")
    return Layout(
        tuple(
            Axis(name=name, size=size, role=by_axis[name], placement=ROLES[by_axis[name]].placement)
            for name, size in mesh_shape.items()
        )
    )


def _parse(roles: str | Mapping[str, str], mesh_shape: Mapping[str, int]) -> dict[str, str]:
    if not isinstance(roles, str):
        return dict(roles)
    if "=" not in roles:
        return dict.fromkeys(mesh_shape, roles)
    parts = [part.split("=", 1) for part in roles.split(",")]
    by_axis = {part[0].strip(): part[-1].strip() for part in parts}
    if len(by_axis) < len(parts):
        raise LayoutError(f"layout {roles!r} names an axis twice; give each axis of {list(mesh_shape)} one role.")
    return by_axis
