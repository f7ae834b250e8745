"""Compiled programs of steps and switches, and the functions that dispatch them."""

from splash_jax.runtime.batch import Batch, Draw, Work, build_batch
from splash_jax.runtime.execute import DeviceState, Results, move_all, prepare_step, run_step
from splash_jax.runtime.programs import Programs, ResetKey, StepKey, SwitchKey, fresh_state
from splash_jax.runtime.settings import check_settings, own_settings
from splash_jax.runtime.shapes import Shapes
from splash_jax.runtime.sizes import state_bytes
from splash_jax.runtime.spread import Side, Spread, prepare_spread_step, spread_programs
from splash_jax.runtime.switch import Switch, SwitchMode, prepare_switch
from splash_jax.runtime.transfer import Route, make_maps, make_route, plan_route

__all__ = [
    "Batch",
    "DeviceState",
    "Draw",
    "Programs",
    "ResetKey",
    "Results",
    "Route",
    "Shapes",
    "Side",
    "Spread",
    "StepKey",
    "Switch",
    "SwitchKey",
    "SwitchMode",
    "Work",
    "build_batch",
    "check_settings",
    "fresh_state",
    "make_maps",
    "make_route",
    "move_all",
    "own_settings",
    "plan_route",
    "prepare_spread_step",
    "prepare_step",
    "prepare_switch",
    "run_step",
    "spread_programs",
    "state_bytes",
]
