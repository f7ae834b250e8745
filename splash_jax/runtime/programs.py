"""Every compiled program, looked up by what it is for. All are compiled before serving; a miss after that is an error.

Layers of one kind share programs, so their number does not grow with depth.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from splash_jax.errors import ProgramMissing
from splash_jax.runtime.host_maps import MemoryMaps
from splash_jax.runtime.keys import Key, ResetKey, StepKey, SwitchKey
from splash_jax.runtime.options import compiler_options
from splash_jax.runtime.placing import to_devices
from splash_jax.runtime.sampler import SamplerState
from splash_jax.runtime.settings import check_settings, own_settings
from splash_jax.runtime.shapes import Shapes
from splash_jax.runtime.signatures import Signatures, host_state

__all__ = ["Key", "Programs", "ResetKey", "StepKey", "SwitchKey", "fresh_state"]

log = logging.getLogger("splash_jax")


class Programs:
    """Compiled programs of one engine on one mesh.

    `get` answers from what was compiled; while `sealed` it raises `ProgramMissing` for the rest, otherwise it compiles
    then and there, says so in the log and counts it in `compiled`.
    """

    def __init__(self, mesh: Mesh, shapes: Shapes) -> None:
        self.mesh, self.shapes = mesh, shapes
        self.sealed = False
        self._signatures = Signatures(mesh, shapes)
        self._options = compiler_options(mesh)
        self._programs: dict[Key, jax.stages.Compiled] = {}
        self._lock = threading.Lock()

    @property
    def compiled(self) -> int:
        return len(self._programs)

    def get(self, key: Key) -> jax.stages.Compiled:
        """The compiled program of a key."""
        program = self._programs.get(key)
        if program is None:
            if self.sealed:
                raise ProgramMissing(f"no program was compiled for {key}; a step asked for what nobody announced.")
            program = self._compile(key, logging.INFO)
        return program

    def _compile(self, key: Key, level: int = logging.DEBUG) -> jax.stages.Compiled:
        began = time.perf_counter()
        with own_settings():
            program = self.lower(key).compile(compiler_options=self._options)
        log.log(level, "compiled %s in %.2f s", key, time.perf_counter() - began)
        with self._lock:
            self._programs[key] = program
        return program

    def prepare(self, keys: Iterable[Key], progress: Callable[[int, int], None] | None = None) -> None:
        """Compile what is missing of `keys`, two at a time: tracing holds the interpreter, compiling does not.

        Raises `ConfigError` as soon as it is known that they take more memory maps than Linux allows a process.
        """
        missing = [key for key in dict.fromkeys(keys) if key not in self._programs]
        maps = MemoryMaps.of_process()
        with ThreadPoolExecutor(2) as pool:
            for done, _ in enumerate(pool.map(self._compile, missing), 1):
                if maps and done % 8 == 0:
                    maps.check(done, len(missing))
                if progress:
                    progress(done, len(missing))

    def lower(self, key: Key) -> jax.stages.Lowered:
        """The program of a key, traced and lowered but not compiled. Raises `ConfigError` for a flag of JAX's that it
        would be wrong under.
        """
        check_settings()
        with own_settings():
            it = self._signatures.of(key)
            mapped = jax.shard_map(
                it.function, mesh=self.mesh, in_specs=it.specs, out_specs=it.out_specs, check_vma=False
            )
            return jax.jit(mapped, donate_argnums=it.donates).lower(*self._signatures.structs(it))


def fresh_state(mesh: Mesh, shapes: Shapes) -> SamplerState:
    """The sampler's state before any token, on every device."""
    every = NamedSharding(mesh, P())
    return SamplerState(*to_devices([np.asarray(x) for x in host_state(shapes)], (every, every)))
