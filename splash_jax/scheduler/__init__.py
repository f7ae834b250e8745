"""Request life, batching, admission, preemption, and the policy that follows the load with the layout. No jax."""

from splash_jax.scheduler.decision_log import explain, log_line, replay
from splash_jax.scheduler.lifetimes import Lifetimes
from splash_jax.scheduler.params import SamplingParams, plain
from splash_jax.scheduler.policy import decide
from splash_jax.scheduler.priced import ModelCosts
from splash_jax.scheduler.quotes import Costs, Observer, SwitchCost, chunk_sizes
from splash_jax.scheduler.request import Request, Rows, Status
from splash_jax.scheduler.residuals import Residuals
from splash_jax.scheduler.scheduler import Chunk, Schedule, Scheduler, Waiting
from splash_jax.scheduler.snapshot import (
    Choice,
    Decision,
    Idle,
    Memory,
    PolicyConfig,
    Quote,
    Run,
    Snapshot,
    Switch,
)

__all__ = [
    "Choice",
    "Chunk",
    "Costs",
    "Decision",
    "Idle",
    "Lifetimes",
    "Memory",
    "ModelCosts",
    "Observer",
    "PolicyConfig",
    "Quote",
    "Request",
    "Residuals",
    "Rows",
    "Run",
    "SamplingParams",
    "Schedule",
    "Scheduler",
    "Snapshot",
    "Status",
    "Switch",
    "SwitchCost",
    "Waiting",
    "chunk_sizes",
    "decide",
    "explain",
    "log_line",
    "plain",
    "replay",
]
