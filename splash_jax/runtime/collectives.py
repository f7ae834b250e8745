"""Read the collectives of a compiled program, and the bytes they bring to each rank, from its HLO text."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# What a rank receives of a collective over groups of n ranks whose result on it has b bytes.
RECEIVED: dict[str, Callable[[int, int], int]] = {
    "all-gather": lambda b, n: b - b // n,
    "all-to-all": lambda b, n: b - b // n,
    "all-reduce": lambda b, n: 2 * (b - b // n),  # the least there is: a reduce-scatter, then an all-gather
    "reduce-scatter": lambda b, n: b * (n - 1),
    "collective-permute": lambda b, n: b,
    "collective-broadcast": lambda b, n: b,
    "ragged-all-to-all": lambda b, n: b,  # at most: how much is real is known at run time only
}

_BITS = {"pred": 8, "token": 0}
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT\s+)?%?(?P<name>[\w.\-]+) = (?P<type>.*?)\s(?P<op>[a-z][a-z0-9\-]*)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<= ]*)\]")
_WIDTH = re.compile(r"[a-z]+?(\d+)")
_LISTED = re.compile(r"replica_groups=\{\{([\d, ]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}")  # as JAX 0.12 writes them
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_NAME = re.compile(r"[\w.\-]+")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_RANKS = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a program, as one rank sees it. In a loop it is counted once."""

    kind: str  # a key of RECEIVED
    result_bytes: int  # of its whole result, all operands together
    group_size: int
    scope: str = ""  # the path of named scopes and primitives that it came from

    @property
    def bytes_received(self) -> int:
        """Bytes that come to a rank from others."""
        return RECEIVED[self.kind](self.result_bytes, self.group_size)


def collective_bytes(compiled: Any) -> list[Collective]:
    """The collectives of a compiled program, given itself or as its HLO text, in the order of the text.

    An asynchronous pair counts once: the groups are its start's and the result is its done's. Raises ValueError for a
    done whose start is not there, and for an element type without a width.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    ranks = rank_count(text)
    found, started = [], {}
    for line in text.splitlines():
        it = read_instruction(line)
        if it is None:
            continue
        kind, _, phase = it.op.rpartition("-")
        if it.op in RECEIVED:
            found.append(collective_of(it.op, it.type, it.rest, ranks))
        elif kind in RECEIVED and phase == "start":
            started[it.name] = it.rest
        elif kind in RECEIVED and phase == "done":
            start = next((word for word in it.words() if word in started), None)
            if start is None:
                raise ValueError(f"no line before {it.name} starts what it ends: {line.strip()[:200]}")
            found.append(collective_of(kind, it.type, started[start], ranks))
    return found


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of HLO text."""

    name: str
    type: str
    op: str
    rest: str  # operands, then attributes

    @property
    def scope(self) -> str:
        """The path of named scopes and primitives that it came from; "" where the compiler made it."""
        found = _SCOPE.search(self.rest)
        return found[1] if found else ""

    def words(self) -> list[str]:
        """Everything in operands and attributes that may be a name."""
        return _NAME.findall(self.rest)


def read_instruction(line: str) -> Instruction | None:
    """The instruction on a line of HLO text, if there is one."""
    match = _INSTRUCTION.match(line)
    return match and Instruction(match["name"], match["type"], match["op"], match["rest"])


def rank_count(text: str) -> int:
    """Ranks that a program of this HLO text runs on."""
    return math.prod(int(n) for n in _RANKS.findall(text.split("\n", 1)[0]))


def collective_of(kind: str, result: str, rest: str, ranks: int) -> Collective:
    """The collective with this result type and these attributes in a program of so many ranks."""
    scope = _SCOPE.search(rest)
    return Collective(
        kind=kind,
        result_bytes=sum(_array_bytes(*array) for array in _ARRAY.findall(result)),
        group_size=_group_size(rest, ranks),
        scope=scope[1] if scope else "",
    )


def _array_bytes(dtype: str, dims: str) -> int:
    bits = _BITS.get(dtype)
    if bits is None:
        width = _WIDTH.match(dtype)
        if width is None:
            raise ValueError(f"element type {dtype!r} has no known width.")
        bits = int(width[1])
    count = math.prod(int(n.strip(" <=")) for n in dims.split(",") if n.strip())
    return (count * bits + 7) // 8


def _group_size(rest: str, ranks: int) -> int:
    """Ranks per group; all of the program's where it names no groups."""
    if listed := _LISTED.search(rest):
        return len(listed[1].split(","))
    if iota := _IOTA.search(rest):
        return int(iota[1].split(",")[-1])
    if mesh := _MESH.search(rest):
        sizes = {name: int(size) for name, size in _AXIS.findall(mesh[1])}
        return math.prod(sizes[axis.strip(" '")] for axis in mesh[2].split(","))
    return ranks
