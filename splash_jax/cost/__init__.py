"""Quotes of steps and switches from hardware constants. No jax."""

from splash_jax.cost.exposed import Spread, exposed_seconds, spread_over_steps
from splash_jax.cost.hardware import Hardware, load_hardware
from splash_jax.cost.roofline import Work, compute_seconds, transfer_seconds

__all__ = [
    "Hardware",
    "Spread",
    "Work",
    "compute_seconds",
    "exposed_seconds",
    "load_hardware",
    "spread_over_steps",
    "transfer_seconds",
]
