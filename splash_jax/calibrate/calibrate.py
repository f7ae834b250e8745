"""Calibration: microbenchmarks, then steps of a real engine, then the fit."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jax

from splash_jax import host
from splash_jax.calibrate.fit import Fit, fit
from splash_jax.calibrate.micro import micro
from splash_jax.calibrate.steps import Measured, loads_to_measure, measure_steps
from splash_jax.cost import Hardware
from splash_jax.engine import Engine, EngineConfig
from splash_jax.engine.pilot import step_model
from splash_jax.errors import ConfigError
from splash_jax.runtime import own_settings

Progress = Callable[[str, int, int], None]  # what, done, in all
ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured and what follows."""

    micro: dict[str, float]
    measured: list[Measured]
    fit: Fit
    seconds: float

    @property
    def hardware(self) -> Hardware:
        return self.fit.hardware


@own_settings()
def calibrate(
    model: Path, *, num_devices: int, layouts: tuple[str, ...] = ("tp", "dp", "cp", "dop"), name: str,
    dtype: str = "auto", max_num_seqs: int = 16, rounds: int = ROUNDS, progress: Progress | None = None,
) -> Calibration:  # fmt: skip
    """Measure this machine with the steps of `model` on `num_devices` devices.

    Raises the errors of `EngineConfig` for what cannot be served.
    """
    began = time.perf_counter()
    if not layouts:
        raise ConfigError("layouts is empty; name at least one to measure.")
    first, *rest = layouts
    round_trip = tuple(pairwise([first, *rest, first])) if rest else ()
    config = EngineConfig(
        model=model, num_devices=num_devices, layout=first, layouts=layouts, directions=round_trip, dtype=dtype,
        switch_modes=("blocking",), max_num_seqs=max_num_seqs, penalties=False, scoring=False, skip_tokenizer_init=True,
    )  # fmt: skip
    engine = Engine(config, progress)
    mesh = engine.programs.mesh
    rates = micro(mesh, engine.blueprint.shapes.dtype)
    device = mesh.devices.flat[0]
    cpu = device.platform == "cpu"
    memory = None if cpu else (device.memory_stats() or {}).get("bytes_limit")
    memory = memory or host.memory().limit // (num_devices if cpu else 1)
    told = f"JAX {jax.__version__}, {num_devices} x {device.device_kind}, {engine.blueprint.shapes.dtype}"
    sources = {key: f"Microbenchmark ({told}), then fitted to steps of {model.name}." for key in rates}
    for key in ("kv_bytes_per_s", "attention_flops_per_s"):
        sources[key] = f"Fitted to steps of {model.name} ({told})."
    sources["hbm_bytes"] = "Of the machine, an even share for each rank." if cpu else "As the device reports it."
    start = Hardware(
        name=name, hbm_bytes=float(memory), provenance=sources, ranks_share_device=cpu,
        hbm_bytes_per_s=rates["hbm_bytes_per_s"], bf16_flops_per_s=rates["bf16_flops_per_s"],
        interconnect_bytes_per_s=rates["interconnect_bytes_per_s"], message_latency_s=rates["message_latency_s"],
        step_overhead_s=rates["step_overhead_s"], kv_bytes_per_s=rates["hbm_bytes_per_s"],
        attention_flops_per_s=rates["bf16_flops_per_s"],
    )  # fmt: skip
    report = None if progress is None else lambda done, total: progress("measuring steps", done, total)
    measured = measure_steps(engine, loads_to_measure(engine), rounds, report)
    fitted = fit(start, measured, lambda hardware: step_model(engine.blueprint, hardware))
    return Calibration(micro=rates, measured=measured, fit=fitted, seconds=time.perf_counter() - began)
