"""Where JAX is going to run, asked before it starts. Imports no jax."""

import ctypes
import importlib.util
import os
import pkgutil

CUDA_DRIVER = "libcuda.so.1"
OTHERS = ("jax_rocm7_plugin", "libtpu")


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
