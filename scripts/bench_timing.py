"""What the benchmarks of kernels share: how a call is timed, what its rates are of ceilings, what is expected."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax


def seconds_of(calls: list[Callable[[], Any]], budget_s: float, repeats: int = 20) -> float:
    """Median seconds of one call, of `calls` that take turns on buffers of their own; each is warmed up first."""
    for call in calls:
        jax.block_until_ready(call())
    per_round, end = [], time.perf_counter() + budget_s
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready([call() for call in calls])
        per_round.append((time.perf_counter() - begin) / len(calls))
        if time.perf_counter() > end:
            break
    return median(per_round)


def shares(row: dict[str, Any], limits: dict[str, float]) -> dict[str, Any]:
    """The row with its rates and what they are of the ceilings."""
    row["bytes_per_s"] = row["bytes"] / row["seconds"]
    row["of_copy"] = row["bytes_per_s"] / limits["copy_bytes_per_s"]
    if "flops" in row:
        row["flops_per_s"] = row["flops"] / row["seconds"]
        row["of_matmul"] = row["flops_per_s"] / limits["matmul_flops_per_s"]
    return row


def expectation(kernel: str, shape: str, found: Any, note: str = "") -> str:
    """An account in one line."""
    text = f"{kernel:23} {shape:51} {found.bytes / 1e6:6.0f} MB {found.flops / 1e9:6.1f} GFLOP  limit "
    text += f"{found.limit_s * 1e6:6.1f} us, expected {found.expected_s * 1e6:6.1f} us ({found.expected_share:4.0%}, "
    text += f"{found.bound + ')':8} {found.bytes / found.expected_s / 1e9:5.0f} GB/s"
    text += f" {found.flops / found.expected_s / 1e12:5.0f} TFLOP/s" if found.flops else ""
    return text + note
