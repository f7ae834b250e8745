"""Quotes of steps, switches and room from hardware constants. No jax."""

from splash_jax.cost.exposed import Spread, exposed_seconds, spread_over_steps
from splash_jax.cost.hardware import Hardware, load_hardware
from splash_jax.cost.load import Load
from splash_jax.cost.roofline import Work, compute_seconds, transfer_seconds
from splash_jax.cost.room import Capacity, Room, capacity, switch_lacks
from splash_jax.cost.served import ServedModel
from splash_jax.cost.step import RESOURCES, StepEstimate, StepModel, estimate_step
from splash_jax.cost.switch import SwitchModel, SwitchQuote, cheapest_spread, quote_switch
from splash_jax.cost.work import Stage, end_stages, layer_stages, loads

__all__ = [
    "RESOURCES",
    "Capacity",
    "Hardware",
    "Load",
    "Room",
    "ServedModel",
    "Spread",
    "Stage",
    "StepEstimate",
    "StepModel",
    "SwitchModel",
    "SwitchQuote",
    "Work",
    "capacity",
    "cheapest_spread",
    "compute_seconds",
    "end_stages",
    "estimate_step",
    "exposed_seconds",
    "layer_stages",
    "load_hardware",
    "loads",
    "quote_switch",
    "spread_over_steps",
    "switch_lacks",
    "transfer_seconds",
]
