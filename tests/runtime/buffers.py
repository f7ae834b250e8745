"""What XLA's buffer assignment says of a compiled program, read from its protocol buffer (xla/service/hlo.proto)."""

from collections.abc import Iterator
from typing import NamedTuple

import jax

ALLOCATIONS = 3  # field of BufferAssignmentProto
SIZE, IS_PARAMETER, PARAMETER, LIVE_OUT = 2, 5, 6, 7  # fields of BufferAllocationProto


class Allocation(NamedTuple):
    """One allocation of a program. Bytes are of one device."""

    size: int
    parameter: int | None  # None: neither an argument nor in one
    live_out: bool  # whether results lie in it


def allocations(compiled: jax.stages.Compiled) -> list[Allocation]:
    """Every allocation of a compiled program."""
    memory = compiled.memory_analysis()
    assert memory is not None and memory.serialized_buffer_assignment_proto, "this JAX shows no buffer assignment."
    found = []
    for number, value in _fields(memory.serialized_buffer_assignment_proto):
        if number == ALLOCATIONS:
            assert isinstance(value, bytes)
            one = dict(_fields(value))
            parameter = int(one.get(PARAMETER, 0)) if one.get(IS_PARAMETER) else None
            found.append(Allocation(int(one.get(SIZE, 0)), parameter, bool(one.get(LIVE_OUT))))
    return found


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of every field: a varint as a number, a string or message as its bytes, the rest as 0."""
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
            yield key >> 3, 0


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
