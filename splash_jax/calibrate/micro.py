"""Microbenchmarks of devices and their links: reading memory, products, collectives, dispatch.

On virtual CPU devices all ranks work at once and share the cores, so rates are of all of them together; on accelerators
they are of one.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

REPEATS = 7
CPU_BYTES, GPU_BYTES = 1 << 28, 1 << 31  # read by all ranks of a CPU, by each accelerator
CPU_SIDE, GPU_SIDE = 1024, 8192  # of the square matrices of a product
PAYLOADS = (1 << 10, 1 << 16, 1 << 20, 1 << 23)  # bytes that a rank receives in a collective


def micro(mesh: Mesh, dtype: str) -> dict[str, float]:
    """Rates in bytes/s and FLOP/s, latencies in seconds, by the names of `splash_jax.cost.Hardware`."""
    ranks, axes = mesh.size, mesh.axis_names
    cpu = mesh.devices.flat[0].platform == "cpu"
    together = ranks if cpu else 1
    sharded = NamedSharding(mesh, P(axes))

    def over_ranks(function: Callable[..., Any], out: Any = None) -> Callable[..., Any]:
        shard = jax.shard_map(function, mesh=mesh, in_specs=P(axes), out_specs=P(axes) if out is None else out)
        return jax.jit(shard)

    def filled(*shape: int) -> jax.Array:
        whole = (ranks * shape[0], *shape[1:])
        make = jax.jit(lambda: jnp.ones(whole, dtype) * jnp.asarray(1e-3, dtype), out_shardings=sharded)
        return jax.block_until_ready(make())

    width = jnp.dtype(dtype).itemsize
    size = (CPU_BYTES // ranks if cpu else GPU_BYTES) // width // 1024
    read = _seconds(over_ranks(lambda x: x.sum(0, keepdims=True)), filled(size, 1024))
    side = CPU_SIDE if cpu else GPU_SIDE
    product = _seconds(over_ranks(lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32)), filled(side, side))
    found = {
        "hbm_bytes_per_s": together * size * 1024 * width / read,
        "bf16_flops_per_s": together * 2 * side**3 / product,
        "step_overhead_s": _seconds(over_ranks(lambda x: x + 1), filled(1, 8)),
    }
    if ranks == 1:  # nothing is ever exchanged
        return found | {"interconnect_bytes_per_s": found["hbm_bytes_per_s"], "message_latency_s": 1e-6}

    def gather(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, axes, tiled=True)[: x.shape[0]]

    times = {}
    for payload in PAYLOADS:
        rows = max(1, payload // width // (ranks - 1))
        times[(ranks - 1) * rows * width] = _seconds(over_ranks(gather), filled(rows))
    latency, per_byte = _line(times)
    return found | {"interconnect_bytes_per_s": together / per_byte, "message_latency_s": latency}


def _seconds(function: Callable[..., Any], *args: Any) -> float:
    """Median of several calls, each waited for."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _line(times: dict[int, float]) -> tuple[float, float]:
    """Latency and seconds per byte of a line through (bytes, seconds), every point weighed by its own time."""
    size, seconds = np.array(list(times), float), np.array(list(times.values()))
    design = np.stack([np.ones_like(size), size], 1) / seconds[:, None]
    latency, per_byte = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)[0]
    least = seconds.min()
    if not latency > 0 or not math.isfinite(latency):
        latency = least / 2
    if not per_byte > 0:
        per_byte = (seconds.max() - latency) / size.max()
    return float(latency), float(per_byte)
