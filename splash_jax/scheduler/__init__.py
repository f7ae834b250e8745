"""Request life, batching, admission and preemption. No jax."""

from splash_jax.scheduler.params import SamplingParams
from splash_jax.scheduler.request import Request, Status
from splash_jax.scheduler.scheduler import Chunk, Schedule, Scheduler

__all__ = ["Chunk", "Request", "SamplingParams", "Schedule", "Scheduler", "Status"]
