"""How programs are compiled for a platform. The reasons, one by one: docs/decisions/0006-deviceless-compile.md."""

from typing import Any

from jax.sharding import Mesh

GPU_OPTIONS: dict[str, bool | int] = {
    # A combined gather would wait for the last of its operands, and so a transfer for the layer beside it.
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
    # Four projections, a history and the layer's own exchanges: what finds no room does not start before the compute.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_enable_triton_gemm": False,  # without a device its tiles are not tuned
}


def compiler_options(mesh: Mesh) -> dict[str, Any] | None:
    """Options for programs on a mesh: those that let a transfer lie beside compute on GPUs, none elsewhere."""
    return dict(GPU_OPTIONS) if mesh.devices.flat[0].platform in ("gpu", "cuda") else None
