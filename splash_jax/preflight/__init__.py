"""What a model would be on GPUs that are not here: compiled for them, and read."""

from splash_jax.preflight.case import Case, draw_case
from splash_jax.preflight.programs import Facts, compile_case
from splash_jax.preflight.report import Report, make_report

__all__ = ["Case", "Facts", "Report", "compile_case", "draw_case", "make_report"]
