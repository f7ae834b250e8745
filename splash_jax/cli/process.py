"""What a command does to its process before JAX is imported, and how it ends when something is wrong."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from splash_jax.platforms import on_cpu


def prepare_process(num_devices: int) -> None:
    """Ask for virtual CPU devices, and for the threads that they need. Leaves accelerators and a running JAX alone.

    JAX reads all of it when it starts. Collectives on virtual devices deadlock with few threads, hence NPROC.
    """
    if "jax" in sys.modules or not on_cpu():
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("NPROC", "32")
    flags = os.environ.get("XLA_FLAGS", "")
    if "host_platform_device_count" not in flags and "JAX_NUM_CPU_DEVICES" not in os.environ:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={num_devices}".strip()


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn the errors a user can meet into one line on stderr and exit code 1. The rest is bugs and keeps its trace."""
    from splash_jax.errors import EngineFailed, SplashError

    try:
        yield
    except EngineFailed:
        raise
    except (SplashError, OSError) as error:
        text = " ".join(str(error).split())
        print(f"error: {text or type(error).__name__}", file=sys.stderr)
        raise SystemExit(1) from None
