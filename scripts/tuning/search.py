"""What tuning is for every op: compile the candidates of a point, choose one, and write it into the op's table."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

from pallas_kernels.chip import CHIPS
from pallas_kernels.compiled import KernelFacts, ptxas_version
from splash_jax.cost import load_hardware
from splash_jax.files import write_text

CLOSE = 1.1  # accounts leave barriers and latencies out
MMA = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")
TABLES = Path(__file__).resolve().parents[2] / "pallas_kernels"
Config = dict[str, Any]
Entry = dict[str, Any]


class Point(NamedTuple):
    """What tells a chip's entries apart, in the words of the op's table."""

    backend: str
    rows: str
    heads: int


class Space(Protocol):
    """What a file of this package has."""

    def points(self, chip: str) -> Iterator[Point]:
        """What the op's table has an entry for."""
        ...

    def candidates(self, backend: str, heads: int) -> Iterator[Config]:
        """Configurations without `workers`, which follow from what the compiler makes of them."""
        ...

    def entry_of(self, chip: str, backend: str, rows: str, heads: int, config: Config) -> Entry | None:
        """The table's entry for a configuration; None where no block of it fits on a multiprocessor."""
        ...

    def expected_s(self, chip: str, entry: Entry) -> float:
        """Seconds that the op's account expects at the chip's published limits."""
        ...

    def in_hand(self, entry: Entry) -> tuple[float, ...]:
        """What decides between entries that their accounts cannot tell apart: the largest is taken."""
        ...


def waits_least(entry: Entry, lines: int, tokens: int) -> tuple[float, ...]:
    """An `in_hand`: query lines x tokens of a program x programs on a multiprocessor, then the deepest pipeline."""
    config = entry["config"]
    return lines * tokens * entry["evidence"]["blocks_per_sm"], lines, config["stages"], -config.get("warps", 0)


def warps_of(lines: int) -> int:
    """A warpgroup of four for every 64 lines, which is what one takes of a product, and at least one."""
    return 4 * max(1, lines // 64)


def table_of(op: str) -> Path:
    """Where an op's entries are written."""
    return TABLES / op / "tuning.json"


def limits(chip: str) -> dict[str, float]:
    """The chip's published ones, as the accounts take them."""
    hardware = load_hardware(chip)
    return {"bytes_per_s": hardware.hbm_bytes_per_s, "flops_per_s": hardware.bf16_flops_per_s}


def fitting(compiled: Callable[[], dict[str, KernelFacts]]) -> dict[str, KernelFacts] | None:
    """The kernels that it compiles; None where the compiler refuses one for its shared memory."""
    try:
        return compiled()
    except jax.errors.JaxRuntimeError as error:
        if "Shared memory size limit exceeded" not in str(error):
            raise
        return None


def told_of(chip: str, facts: KernelFacts, smem: int | None = None) -> dict[str, Any] | None:
    """What a table keeps of one kernel; None where no block of it fits on a multiprocessor.

    Args:
      smem: bytes of shared memory, of a kernel whose launch the compiler does not tell.
    """
    smem = facts.smem if smem is None else smem
    assert smem is not None
    resident = CHIPS[chip].blocks_resident(registers=facts.registers, smem=smem, threads=facts.threads)
    if not resident:
        return None
    told = {
        "registers": facts.registers,
        "spill_bytes": facts.spills,
        "smem_bytes": smem,
        "threads": facts.threads,
        "blocks_per_sm": resident,
    }
    mma = next((name for name in MMA if facts.instructions[name]), None)
    return told if mma is None else told | {"mma": mma}


def entry(point: Point, config: Config, told: dict[str, Any]) -> Entry:
    """A table's entry, its evidence signed by the compilers that it is of."""
    evidence = {"jax": jax.__version__, "ptxas": ptxas_version(), **told, "measured": None}
    return {**point._asdict(), "config": config, "evidence": evidence}


def point_of(entry: Entry) -> Point:
    """Where in its table an entry stands."""
    return Point(entry["backend"], entry["rows"], entry["heads"])


def parts_of(entry: Entry) -> dict[str, dict[str, Any]]:
    """The evidence of each of an entry's kernels, by its name; "" where there is one."""
    evidence = entry["evidence"]
    return {name: part for name, part in evidence.items() if isinstance(part, dict)} or {"": evidence}


def spilled(entry: Entry) -> int:
    """Bytes, of all its kernels."""
    return sum(part["spill_bytes"] for part in parts_of(entry).values())


def choose(space: Space, found: list[tuple[Entry, float]]) -> Entry:
    """The best of (entry, expected seconds): it spills least, then is among the soonest, then has the most in hand."""
    least = min(spilled(entry) for entry, _ in found)
    clean = [(entry, seconds) for entry, seconds in found if spilled(entry) == least]
    soon = CLOSE * min(seconds for _, seconds in clean)
    return max((entry for entry, seconds in clean if seconds <= soon), key=space.in_hand)


def write(chip: str, best: list[Entry], path: Path) -> None:
    """Replace the chip's entries for the same points, one entry a line."""
    old = json.loads(path.read_text(encoding="utf-8"))["chips"] if path.exists() else {}
    chips = {name: {point_of(e): e for e in entries} for name, entries in old.items()}
    chips.setdefault(chip, {}).update({point_of(entry): entry for entry in best})
    lines = [
        f'"{name}": [\n' + ",\n".join(json.dumps(entry) for entry in entries.values()) + "\n]"
        for name, entries in chips.items()
    ]
    write_text(path, '{\n"chips": {\n' + ",\n".join(lines) + "\n}\n}\n")
