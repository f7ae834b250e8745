"""What an engine asks of the process and platform it runs on."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.sharding import Mesh

from splash_jax.errors import ConfigError
from splash_jax.platforms import on_cpu

_FULL = "RESOURCE_EXHAUSTED"

log = logging.getLogger("splash_jax")

CACHE_DIR = "jax_compilation_cache_dir"
NUM_CPU_DEVICES = "jax_num_cpu_devices"


def prepare_platform(num_devices: int) -> None:
    """Ask for virtual CPU devices while that is still possible, and warn of the known deadlock when it is not."""
    if not on_cpu():
        return
    told = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    try:
        if not told and getattr(jax.config, NUM_CPU_DEVICES) < num_devices:
            jax.config.update(NUM_CPU_DEVICES, num_devices)
    except RuntimeError:
        log.debug("devices exist already; their number stays")
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if num_devices > 1 and version < (0, 12) and int(os.environ.get("NPROC", "0")) < 16:
        warnings.warn(
            "several virtual CPU devices can deadlock in this JAX: set NPROC=32 in the environment before JAX starts.",
            stacklevel=3,
        )


def start_devices() -> None:
    """Start JAX's devices if they are not. Raises `ConfigError` where there are none of the platform asked for."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion of JAX's own where a plugin finds no device
        asked = os.environ.get("JAX_PLATFORMS") or "not set"
        raise ConfigError(
            f"JAX finds no device; JAX_PLATFORMS is {asked}. Correct it, or set JAX_PLATFORMS=cpu ({error})."
        ) from error


@contextmanager
def room_on_devices(budget: str) -> Iterator[None]:
    """Turn the devices' or the host's "out of memory" into a `ConfigError` that names the settings to lower."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if _FULL not in str(error) and not isinstance(error, MemoryError):
            raise
        told = str(error).rpartition(_FULL)[2].strip(": ").partition("\n")[0]
        raise ConfigError(f"the devices have no room for this engine ({told}). Lower {budget}.") from error


def use_compilation_cache(path: str | Path | None) -> None:
    """Keep compiled programs in JAX's persistent cache, small ones too, unless the process already has one."""
    if path is None:
        return
    if getattr(jax.config, CACHE_DIR) is None:
        jax.config.update(CACHE_DIR, str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    log.info("compiled programs are kept in %s", getattr(jax.config, CACHE_DIR))


def check_host_memory(mesh: Mesh, device_bytes: int) -> None:
    """Raise `ConfigError` when this process's CPU devices need more memory, `device_bytes` each, than there is."""
    devices = [device for device in mesh.local_devices if device.platform == "cpu"]
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    if have is not None and len(devices) * device_bytes > have:
        raise ConfigError(
            f"{len(devices)} CPU devices of {device_bytes} bytes need {len(devices) * device_bytes} bytes and this "
            f"machine has {have}. Lower device_memory_bytes, max_num_seqs or num_devices."
        )


def free_memory(mesh: Mesh) -> int | None:
    """Bytes free on the fullest device, a tenth kept back; None where the platform does not say (CPU)."""
    stats = [device.memory_stats() for device in mesh.devices.flat]
    if any(not s or "bytes_limit" not in s for s in stats):
        return None
    return int(min(s["bytes_limit"] - s["bytes_in_use"] for s in stats) * 0.9)
