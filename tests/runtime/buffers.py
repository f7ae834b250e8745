"""What XLA's buffer assignment says of a compiled program."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

ALLOCATIONS = 3  # field of BufferAssignmentProto in xla/service/hlo.proto
SIZE, IS_PARAMETER, LIVE_OUT = 2, 5, 7  # fields of BufferAllocationProto
_LINE = re.compile(r"^ *allocation \d+: (?:0x\w+, )?size (?P<size>\d+)(?P<rest>.*)$", re.MULTILINE)


class Allocation(NamedTuple):
    """One allocation of a program. Bytes are of one device."""

    size: int
    argument: bool
    result: bool  # whether results lie in it


def compile_and_read(
    lowered: jax.stages.Lowered, options: dict[str, Any] | None
) -> tuple[jax.stages.Compiled, list[Allocation]]:
    """A compiled program and all its allocations.

    Without a device JAX hands out no buffer assignment, so there the compiler writes it into a file.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = {} if options is None else {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options={**(options or {}), **dump})
        texts = [path.read_text(encoding="utf-8") for path in Path(folder).glob("*buffer-assignment.txt")]
    if not dump:
        memory = compiled.memory_analysis()
        assert memory is not None and memory.serialized_buffer_assignment_proto
        return compiled, list(_allocations(memory.serialized_buffer_assignment_proto))
    found = [
        Allocation(int(line["size"]), ", parameter " in line["rest"], "maybe-live-out" in line["rest"])
        for line in _LINE.finditer("\n".join(texts))
    ]
    assert len(texts) == 1 and found, "the compiler wrote no buffer assignment."
    return compiled, found


def _allocations(assignment: bytes) -> Iterator[Allocation]:
    for number, value in _fields(assignment):
        if number == ALLOCATIONS and isinstance(value, bytes):
            one = dict(_fields(value))
            yield Allocation(int(one.get(SIZE, 0)), bool(one.get(IS_PARAMETER)), bool(one.get(LIVE_OUT)))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of every field of a protocol buffer: a varint as a number, a string or message as its bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
        elif kind == 2:
            size, at = _varint(message, at)
            yield key >> 3, message[at : at + size]
            at += size
        else:
            at += {1: 8, 5: 4}[kind]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
