"""Compile what a case needs for its GPUs, and keep what is read from each program."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from splash_jax.configs import config_names
from splash_jax.cost import Hardware, load_hardware
from splash_jax.engine.build import Progress
from splash_jax.engine.platform import spare_the_trace
from splash_jax.errors import TargetError
from splash_jax.host import processors
from splash_jax.preflight.case import STEPS, Case
from splash_jax.runtime import Programs, StepKey, SwitchKey
from splash_jax.runtime.keys import Key
from splash_jax.runtime.schedule import Schedule, read_schedule
from splash_jax.runtime.target import clear_compile_errors, target_mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one compiled program says of itself. Bytes are of one rank."""

    schedule: Schedule
    arguments: int
    outputs: int
    alias: int  # of the outputs, those that lie in donated arguments
    temporaries: int
    seconds: float  # to trace, lower and compile

    @property
    def grown(self) -> int:
        """Bytes that exist at the program's peak beside its arguments."""
        return self.outputs - self.alias + self.temporaries


def step_keys(case: Case) -> Iterator[StepKey]:
    """One layer of each kind in every layout's two steps; embedding and head, whose work is the same in all of them, in
    the first layout's.
    """
    for layout in case.layouts:
        for step in STEPS:
            for part in (*case.compiled_kinds, *(("embed", "head") if layout == case.layouts[0] else ())):
                yield StepKey(part=part, layout=layout, bucket=case.buckets[layout][step], pages=case.pages(layout))


def switch_keys(case: Case) -> Iterator[SwitchKey]:
    """Of every switch the first layer's transfer alone, then a transfer beside a layer of each kind and step."""
    for (_, dst), (_, route) in case.switches.items():
        if route.moves_nothing:
            continue
        yield SwitchKey(route=route)
        for step in STEPS:
            for kind in case.compiled_kinds:
                yield SwitchKey(route=route, kind=kind, bucket=case.buckets[dst][step])


def compile_case(case: Case, progress: Progress | None = None) -> dict[Key, Facts]:
    """Every program of a case. Raises TargetError where the compiler is missing or does not know the GPU."""
    spare_the_trace()
    programs = Programs(target_mesh(target_of(case.hardware), case.mesh_sizes), case.shapes)
    keys: list[Key] = [*step_keys(case), *switch_keys(case)]
    found: dict[Key, Facts] = {}
    with clear_compile_errors(), ThreadPoolExecutor(processors()) as pool:
        for key, facts in zip(keys, pool.map(lambda key: _compile(programs, key), keys), strict=True):
            found[key] = facts
            if progress:
                progress("compiling programs", len(found), len(keys))
    return found


def _compile(programs: Programs, key: Key) -> Facts:
    began = perf_counter()
    try:
        compiled = programs.get(key)
    except Exception as error:
        error.add_note(f"while compiling: {key}")
        raise
    seconds = perf_counter() - began
    memory = compiled.memory_analysis()
    if memory is None:
        raise ValueError(f"the compiler says nothing about the memory of {key}.")
    return Facts(
        schedule=read_schedule(compiled),
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        alias=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        seconds=seconds,
    )


def target_of(hardware: Hardware) -> Path:
    """What XLA compiles for. Raises `TargetError`, with the profiles that have it, where a profile has none."""
    if hardware.target is None:
        kinds = ", ".join(name for name in config_names("hardware") if load_hardware(name).target)
        raise TargetError(f"{hardware.name} has no target that XLA could compile for from here; choose {kinds}.")
    return hardware.target
