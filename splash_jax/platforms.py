"""Where JAX is going to run, asked before it starts. Imports no jax."""

import ctypes
import importlib.util
import os
import pkgutil
from importlib.metadata import entry_points
from pathlib import Path

CUDA_DRIVER = "libcuda.so.1"
OTHERS = ("jax_rocm7_plugin", "libtpu")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # as Linux names them; the last one is Arm's


def on_cpu(platforms: str | None = None) -> bool:
    """Whether JAX will run on the CPU: as `platforms` says, else where no plugin finds the accelerator it is for.

    `platforms` is JAX's own setting where JAX is imported; None: that of the environment, JAX_PLATFORMS.
    The CUDA plugin is also XLA's GPU compiler (`splash preflight`), so it may be here where no GPU is.
    """
    if platforms is None:
        platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms.split(",")[0] == "cpu"
    plugins = _plugins()
    if any(importlib.util.find_spec(name) for name in OTHERS) or any("cuda" not in name for name in plugins):
        return False
    return not (plugins and has_cuda_driver())


def cuda_without_driver() -> bool:
    """Whether JAX's CUDA plugin is here and no GPU can be: starting, JAX would print a trace of what it misses."""
    return any("cuda" in name for name in _plugins()) and not has_cuda_driver()


def _plugins() -> set[str]:
    """Names of the plugins that JAX would load: modules of its namespace, and what packages announce."""
    found = importlib.util.find_spec("jax_plugins")
    places = () if found is None else found.submodule_search_locations or ()
    announced = {point.value.rpartition(".")[2] for point in entry_points(group="jax_plugins")}
    return {module.name for module in pkgutil.iter_modules(places)} | announced


def has_cuda_driver() -> bool:
    """Whether the CUDA driver is installed, without which no program can use an NVIDIA GPU."""
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return False
    return True


def cpu_has_bfloat16(info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's CPU multiplies bfloat16 by itself. False where the system does not say (no Linux)."""
    try:
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    features = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return not BFLOAT16_FLAGS.isdisjoint(next(features, []))
