"""Quotes of steps, switches and room from hardware constants. No jax."""

from splash_jax.cost.exposed import Spread, exposed_seconds, spread_over_steps
from splash_jax.cost.hardware import Hardware, load_hardware
from splash_jax.cost.load import Load
from splash_jax.cost.roofline import Work, compute_seconds, transfer_seconds
from splash_jax.cost.served import ServedModel
from splash_jax.cost.step import RESOURCES, StepEstimate, StepModel, estimate_step
from splash_jax.cost.work import Stage, end_stages, layer_stages, loads

__all__ = [
    "RESOURCES",
    "Hardware",
    "Load",
    "ServedModel",
    "Spread",
    "Stage",
    "StepEstimate",
    "StepModel",
    "Work",
    "compute_seconds",
    "end_stages",
    "estimate_step",
    "exposed_seconds",
    "layer_stages",
    "load_hardware",
    "loads",
    "spread_over_steps",
    "transfer_seconds",
]
