"""Roles of a mesh axis, one file each, and what a layout made of them does around attention."""

from splash_jax.layouts.compose import Exchange
from splash_jax.layouts.registry import ROLES, make_layout
from splash_jax.layouts.role import AbstractRole
from splash_jax.layouts.specs import attention_mesh, local_spec, pool_spec, row_spec, weight_spec

__all__ = [
    "ROLES",
    "AbstractRole",
    "Exchange",
    "attention_mesh",
    "local_spec",
    "make_layout",
    "pool_spec",
    "row_spec",
    "weight_spec",
]
