"""Read what a compiler made of a kernel: PTX instructions, registers, spills, shared memory, launch shape.

`DUMP` are the options under which XLA writes what `read_kernels` reads; a program compiled with them needs no GPU.
"""

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

_LAUNCH = re.compile(
    r"\bkCustomKernel .*?\] (?P<name>\w+) grid: \[(?P<grid>[\d, ]+)\] threads: \[(?P<threads>[\d, ]+)\]\s+"
    r"shared_memory: (?P<smem>\d+) bytes"
)
_MOSAIC = "_mosaic_gpu_kernel"  # how Mosaic GPU's kernels are called
_THREADS = re.compile(r"\.maxntid (\d+)")
_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.MULTILINE)
_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
_INSTRUCTION = re.compile(
    r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync|cp\.async\.bulk\.tensor|cp\.async\.bulk|cp\.async\.c[ag]"
    r"|ld\.global|st\.global|cvt\.rn\.f16x2\.e4m3x2|setmaxnreg|fence\.proxy\.async|tcgen05\.wait::ld)\b"
)
_ACCESS = re.compile(r"\b(?:ld|st)\.global(?:\.v\d)?\.b\d+")
_LOSS = re.compile(r"Potential Performance Loss: (.+)")
_RELEASE = re.compile(r"release (\d+\.\d+)")
_RESOURCES = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """One kernel of a compiled program. Shared memory and spills in bytes."""

    name: str
    grid: tuple[int, ...]  # () for a Mosaic GPU kernel: its launch is inside the kernel's own module
    threads: int
    smem: int | None  # likewise None
    registers: int
    spills: int
    instructions: Counter[str]  # how often each of the instructions that matter stands in the PTX
    accesses: Counter[str]  # of device memory, by their width: ld.global.v4.b32
    losses: tuple[str, ...]  # of speed, that ptxas reports of the kernel's file: setmaxnreg ignored, wgmma serialized


def dump_options(folder: Path) -> dict[str, str | bool]:
    """Options for `lowered.compile(compiler_options=...)` that leave in `folder` what `read_kernels` reads.

    Mosaic GPU's kernels are left there where the environment variable MOSAIC_GPU_DUMP_TO names the folder, too.
    """
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True, "xla_dump_emitter_re": "ptx"}


def read_kernels(folder: Path) -> dict[str, KernelFacts]:
    """The kernels of the program whose compilation was dumped into `folder`, by name."""
    launches = [
        match
        for path in sorted(folder.glob("*thunk_sequence.txt"))
        for match in _LAUNCH.finditer(path.read_text(encoding="utf-8"))
    ]
    facts = {}
    for path in sorted(folder.glob("*.ptx")):
        ptx = path.read_text(encoding="utf-8")
        if not _ENTRY.search(ptx):
            continue
        told = assemble(path, _first(_TARGET, ptx))
        used = {match["name"]: match for match in _RESOURCES.finditer(told)}
        for entry in re.split(r"(?=^\.visible \.entry )", ptx, flags=re.MULTILINE)[1:]:
            name = _first(_ENTRY, entry)
            launch = next((found for found in launches if found["name"] == name), None)
            if launch is not None or _MOSAIC in name:
                facts[name.removesuffix(_MOSAIC)] = KernelFacts(
                    name=name,
                    grid=_numbers(launch["grid"]) if launch else (),
                    threads=_numbers(launch["threads"] if launch else _first(_THREADS, entry))[0],
                    smem=int(launch["smem"]) if launch else None,
                    registers=int(used[name]["registers"]),
                    spills=int(used[name]["stores"]) + int(used[name]["loads"]),
                    instructions=Counter(_INSTRUCTION.findall(entry)),
                    accesses=Counter(_ACCESS.findall(entry)),
                    losses=tuple(_LOSS.findall(told)),
                )
    return facts


def assemble(ptx: Path, target: str) -> str:
    """What ptxas reports of the registers and spills of every kernel in a file."""
    command = [find_ptxas(), "-v", f"-arch={target}", str(ptx), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas refuses {ptx.name}: {done.stderr.strip()[:500]}")
    return done.stderr + done.stdout


def find_ptxas() -> str:
    """The ptxas that XLA uses: the one of the pip package nvidia-cuda-nvcc, else the one on PATH.

    Mosaic GPU takes the first on PATH.
    """
    nvidia = importlib.util.find_spec("nvidia")
    for place in nvidia.submodule_search_locations or () if nvidia else ():
        for found in sorted(Path(place).glob("**/bin/ptxas")):
            return str(found)
    found = shutil.which("ptxas")
    if found is None:
        raise FileNotFoundError("no ptxas: install the pip package nvidia-cuda-nvcc, or put a CUDA toolkit's on PATH.")
    return found


@cache
def ptxas_version() -> str:
    """Release of `find_ptxas`, as "13.5"."""
    told = subprocess.run([find_ptxas(), "--version"], capture_output=True, text=True, check=True).stdout
    return _first(_RELEASE, told)


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    if match is None:
        raise ValueError(f"no {pattern.pattern} in {text[:80]!r}.")
    return match[1]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))
