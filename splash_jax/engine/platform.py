"""What an engine asks of the process and platform it runs on."""

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.sharding import Mesh

from splash_jax.engine.config import DEFAULT_CACHE_DIR
from splash_jax.errors import ConfigError
from splash_jax.host import memory, threads
from splash_jax.platforms import cuda_without_driver, on_cpu

_FULL = "RESOURCE_EXHAUSTED"

log = logging.getLogger("splash_jax")

CACHE_DIR = "jax_compilation_cache_dir"
MORE_THREADS = 16  # of an engine on CPU, beside two pools of NPROC; measured with 1 to 8 devices
NEVER_S = 1 << 30  # no program takes so long to compile that it would be kept
NUM_CPU_DEVICES = "jax_num_cpu_devices"


def prepare_platform(num_devices: int) -> None:
    """Ask for virtual CPU devices while that is still possible, and warn of the known deadlock when it is not.

    Raises `ConfigError` where the process may not have the threads that XLA starts, for want of which it would abort.
    """
    if not on_cpu(jax.config.jax_platforms):  # type: ignore[attr-defined]
        return
    spare_the_trace()
    counted = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    try:
        if not counted and getattr(jax.config, NUM_CPU_DEVICES) < num_devices:
            jax.config.update(NUM_CPU_DEVICES, num_devices)
    except RuntimeError:
        log.debug("devices exist already; their number stays")
    told, wide = _nproc(), _nproc() or _cores()
    room, need = threads(), 2 * wide + MORE_THREADS
    if room.limit < need:
        raise ConfigError(
            f"XLA starts about {need} threads (NPROC is {wide}), this process may have {room.limit} by {room.whose}; "
            "raise that limit, or lower NPROC where num_devices is 1."
        )
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if num_devices > 1 and version < (0, 12) and told < 16:
        warnings.warn(
            "several virtual CPU devices can deadlock in this JAX: set NPROC=32 in the environment before JAX starts.",
            stacklevel=3,
        )


def _cores() -> int:
    """Cores that XLA counts: those that the process is bound to, whatever share of their time it may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _nproc() -> int:
    """Threads that the environment asks XLA for; 0 where it does not. Raises `ConfigError` for what is no number."""
    given = os.environ.get("NPROC", "").strip()
    if not given:
        return 0
    if not (given.isascii() and given.isdigit() and int(given)):
        raise ConfigError(f"NPROC is {given!r}, which is no number of threads; set NPROC=32 in the environment.")
    return int(given)


def spare_the_trace() -> None:
    """Have JAX leave its CUDA plugin alone where no GPU can be: it would print why it cannot use one, as a trace.

    The plugin stays the GPU compiler of `splash preflight`, which asks for it by name.
    """
    if not jax.config.jax_platforms and cuda_without_driver():  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")


def start_devices() -> None:
    """Start JAX's devices if they are not. Raises `ConfigError` where there are none of the platform asked for."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion of JAX's own where a plugin finds no device
        given = {name: os.environ.get(name) for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")}
        asked = [f"{name} is {value}" for name, value in given.items() if value] or ["JAX_PLATFORMS is not set"]
        cpu = [f"{name}=cpu" for name, value in given.items() if value] or ["JAX_PLATFORMS=cpu"]
        raise ConfigError(
            f"JAX finds no device; {', '.join(asked)}. Correct it, or set {' '.join(cpu)} ({error})."
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
    """Keep compiled programs in JAX's persistent cache, small ones too, unless the process already has one.

    A cache only saves time. So where the default folder, or the process's own, cannot be made, the engine goes without,
    and where it may only be read, it is only read; one line of the log says so. Raises `ConfigError` for a folder that
    the settings name and that cannot be used.
    """
    if path is None:
        return
    own = getattr(jax.config, CACHE_DIR)
    folder = str(path) if own is None else own
    if "://" in folder:  # what is in a cloud, JAX asks for itself
        wrong, writable = "", True
    else:
        folder = folder if own is not None else os.path.expanduser(folder)
        wrong, writable = _try_folder(folder)
    if wrong and own is None and str(path) != DEFAULT_CACHE_DIR:
        raise ConfigError(
            f"compilation_cache_dir {folder!r} cannot be used: {wrong}. Name a folder that may be written, or None."
        )
    jax.config.update(CACHE_DIR, None if wrong else folder)
    if wrong:
        log.warning("compiled programs are not kept: %s cannot be used as their cache (%s).", folder, wrong)
        return
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0 if writable else NEVER_S)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if writable:
        log.info("compiled programs are kept in %s", folder)
    else:
        log.warning("compiled programs are read from %s, which takes no new ones.", folder)


def _try_folder(folder: str) -> tuple[str, bool]:
    """Why a folder, made where it is missing, can be no cache, nothing where it can; and whether it takes files."""
    if folder.startswith("~"):
        return "this user has no home folder", False
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        os.scandir(folder).close()
    except OSError as error:
        return error.strerror or str(error), False
    try:
        with tempfile.TemporaryFile(dir=folder) as tried:
            tried.write(bytes(4096))
    except OSError:
        return "", False
    return "", True


def check_host_memory(mesh: Mesh, device_bytes: int) -> None:
    """Raise `ConfigError` when this process's CPU devices need more memory, `device_bytes` each, than it may have."""
    devices = [device for device in mesh.local_devices if device.platform == "cpu"]
    room = memory()
    if len(devices) * device_bytes > room.left:
        raise ConfigError(
            f"{len(devices)} CPU devices of {device_bytes} bytes need {len(devices) * device_bytes} bytes and this "
            f"process has {room.left} left: {room.limit} by {room.whose}, less {room.used} that it has taken already. "
            f"Lower device_memory_bytes, max_num_seqs or num_devices, or raise that limit."
        )


def free_memory(mesh: Mesh) -> int | None:
    """Bytes free on the fullest device, a tenth kept back; None where the platform does not say (CPU)."""
    stats = [device.memory_stats() for device in mesh.devices.flat]
    if any(not s or "bytes_limit" not in s for s in stats):
        return None
    return int(min(s["bytes_limit"] - s["bytes_in_use"] for s in stats) * 0.9)
