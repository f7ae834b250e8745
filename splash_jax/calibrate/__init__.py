"""Measure what the cost model has to know of the machine at hand."""

from splash_jax.calibrate.calibrate import Calibration, calibrate
from splash_jax.calibrate.profile import profile_toml

__all__ = ["Calibration", "calibrate", "profile_toml"]
