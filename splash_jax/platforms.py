"""Where JAX is going to run, asked before it starts. Imports no jax."""

import ctypes
import importlib.util
import os
import pkgutil
from pathlib import Path

CUDA_DRIVER = "libcuda.so.1"
OTHERS = ("jax_rocm7_plugin", "libtpu")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # as Linux names them; the last one is Arm's


def on_cpu() -> bool:
    """Whether JAX will run on the CPU: as JAX_PLATFORMS says, else where no plugin finds the accelerator it is for.

    The CUDA plugin is also XLA's GPU compiler (`splash preflight`), so it may be here where no GPU is.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms.split(",")[0] == "cpu"
    found = importlib.util.find_spec("jax_plugins")
    plugins = [] if found is None else [m.name for m in pkgutil.iter_modules(found.submodule_search_locations)]
    if any(importlib.util.find_spec(name) for name in OTHERS) or any("cuda" not in name for name in plugins):
        return False
    return not (plugins and has_cuda_driver())


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
