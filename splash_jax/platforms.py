"""Where JAX is going to run, asked before it starts. Imports no jax."""

import importlib.util
import os

ACCELERATORS = ("jax_plugins", "jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin", "libtpu")


def on_cpu() -> bool:
    """Whether JAX will run on the CPU: as JAX_PLATFORMS says, else where no plugin for an accelerator is installed."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms.split(",")[0] == "cpu"
    return not any(importlib.util.find_spec(name) for name in ACCELERATORS)
