"""A switch on its way from a plan to the devices. All that can go wrong without touching any state goes wrong here."""

import enum
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding

from splash_jax.layouts import local_spec
from splash_jax.ownership import SwitchPlan
from splash_jax.runtime.checks import SWITCH_CHECKS, raise_faults
from splash_jax.runtime.keys import SwitchCheckKey
from splash_jax.runtime.placing import to_devices
from splash_jax.runtime.programs import Programs
from splash_jax.runtime.transfer import Maps, Route, make_maps


class SwitchMode(enum.StrEnum):
    """How the state of a switch moves. The step that comes out of it is the same."""

    SPLASH = "splash"  # inside the step: layer i's state in the program that computes layer i - 1
    BLOCKING = "blocking"  # all of it before the step begins, nothing beside it: a reference
    SPREAD = "spread"  # a few layers per step over several steps, each in parts beside many other layers


class Switch(NamedTuple):
    """A switch ready to be carried out, once: its maps are on the devices."""

    plan: SwitchPlan
    route: Route
    rounds: tuple[tuple[jax.Array, ...], ...]  # see `transfer.Maps`; empty where nothing moves
    mode: SwitchMode


def prepare_switch(
    programs: Programs, plan: SwitchPlan, route: Route, mode: SwitchMode = SwitchMode.SPLASH
) -> Switch:  # fmt: skip
    """Send a plan's maps to the devices. What it raises has changed nothing."""
    rounds = () if route.moves_nothing else make_maps(route, plan.kv)
    return Switch(plan, route, tuple(put_maps(programs, route, maps) for maps in rounds), mode)


def put_maps(programs: Programs, route: Route, maps: Maps) -> tuple[jax.Array, ...]:
    """Send one round of maps to the devices. With `debug_checks` raises `BoundsError` for a bad index."""
    dealt = NamedSharding(programs.mesh, local_spec(route.src))
    sent = to_devices(maps, (dealt, dealt))
    if programs.shapes.debug_checks and maps.write.size:
        faults = programs.get(SwitchCheckKey(route=route))(*sent)
        raise_faults(f"a switch {route.src} -> {route.dst}", SWITCH_CHECKS, faults)
    return sent
