"""The constants of Eq. 10 fitted to measured steps, held to what microbenchmarks say of them."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from splash_jax.calibrate.steps import Measured
from splash_jax.cost import Hardware, StepModel

FITTED = (
    "hbm_bytes_per_s", "bf16_flops_per_s", "kv_bytes_per_s", "attention_flops_per_s", "interconnect_bytes_per_s",
    "message_latency_s", "step_overhead_s",
)  # fmt: skip
HOLD = 0.05  # weight of a constant's distance from its microbenchmark, beside a step's of its prediction; in logs


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted profile and how far off its predictions are, as parts of the measured seconds."""

    hardware: Hardware
    median_error: float
    worst_error: float
    worst: Measured
    noise: float  # median of half the quartiles' distance over the median: what no model can explain
    regret: float  # mean over loads: time lost by taking the layout that the profile calls fastest
    worst_regret: float


def fit(start: Hardware, measured: Sequence[Measured], model: Callable[[Hardware], StepModel]) -> Fit:
    """Fit `start`'s constants to measured steps. `model` makes the cost model of a profile.

    Least squares of the logs of predicted over measured seconds, the constants held near `start` with little weight:
    one that no step depends on stays where its microbenchmark put it.
    """
    begin = np.log([_value(start, name) for name in FITTED])
    actual = np.log([one.seconds for one in measured])

    def with_constants(logs: np.ndarray) -> Hardware:
        return replace(start, **dict(zip(FITTED, np.exp(logs).tolist(), strict=True)))

    def misses(logs: np.ndarray) -> np.ndarray:
        predicted = np.log(predict(model(with_constants(logs)), measured))
        return np.concatenate([predicted - actual, HOLD * (logs - begin)])

    best = least_squares(misses, begin, loss="soft_l1", f_scale=0.1, diff_step=1e-3)
    hardware = with_constants(best.x)
    predicted = predict(model(hardware), measured)
    errors = [abs(p / one.seconds - 1) for p, one in zip(predicted, measured, strict=True)]
    last = int(np.argmax(errors))
    lost = regrets(predicted, measured)
    return Fit(
        hardware=hardware,
        median_error=statistics.median(errors),
        worst_error=errors[last],
        worst=measured[last],
        noise=statistics.median((one.high - one.low) / 2 / one.seconds for one in measured),
        regret=statistics.mean(lost),
        worst_regret=max(lost),
    )


def predict(model: StepModel, measured: Sequence[Measured]) -> np.ndarray:
    """Seconds of every measured step by a cost model. f64[len(measured)]."""
    known = {id(one.load): model.seconds(one.load) for one in measured}
    return np.array([known[id(one.load)][one.layout].seconds for one in measured])


def regrets(predicted: np.ndarray, measured: Sequence[Measured]) -> list[float]:
    """For every load, how much longer the layout with the least prediction took than the fastest."""
    by_load: dict[int, list[tuple[float, float]]] = {}
    for p, one in zip(predicted.tolist(), measured, strict=True):
        by_load.setdefault(id(one.load), []).append((p, one.seconds))
    return [min(of_load)[1] / min(seconds for _, seconds in of_load) - 1 for of_load in by_load.values()]


def _value(hardware: Hardware, name: str) -> float:
    value = {"kv_bytes_per_s": hardware.kv_rate, "attention_flops_per_s": hardware.attention_rate}.get(name)
    return max(getattr(hardware, name) if value is None else value, math.ulp(0.0) if value is None else 1.0)
