"""Read the schedule of a compiled program: what computes while each collective is on its way, and what it waits for.

The order of the entry computation's lines is the order in which a GPU's host launches them. A collective split into
a start and a done runs beside what stands between the two.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from splash_jax.runtime.collectives import (
    RECEIVED,
    Collective,
    Instruction,
    collective_of,
    rank_count,
    read_instruction,
)

MOVE = "switch.move"  # the named scope of everything a switch adds to a layer's program

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+)\b.*\{$")
_FREE = {  # what costs nothing to speak of, or only moves what others computed
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "iota"),
    *("copy", "copy-start", "copy-done", "broadcast", "reshape", "transpose", "partition-id", "replica-id"),
}
# What may hold a collective in a computation that it calls, and its phase. GPUs since JAX 0.12 fuse small all-reduces.
_WRAPPERS = {"async-start": "start", "fusion-start": "start", "fusion": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """One collective where the program starts it."""

    collective: Collective
    asynchronous: bool
    start: int  # index of the lines in `Schedule.order`; of a synchronous one both are the same
    done: int
    beside: tuple[str, ...]  # compute outside `MOVE` between start and done
    needs: tuple[str, ...]  # compute outside `MOVE` that its operands come from

    @property
    def moves(self) -> bool:
        """Whether it belongs to a transfer, not to a layer's own exchange."""
        return MOVE in self.collective.scope

    @property
    def hidden(self) -> bool:
        """Whether it can be on its way while the layer computes, and does not wait for that layer."""
        return self.asynchronous and bool(self.beside) and not self.needs


@dataclass(frozen=True)
class Schedule:
    """The entry computation of a program."""

    order: tuple[Instruction, ...]
    collectives: tuple[Scheduled, ...]  # by start
    compute: Mapping[int, str]  # index in `order` -> scope, of compute outside `MOVE`

    @cached_property
    def transfers(self) -> tuple[Scheduled, ...]:
        return tuple(c for c in self.collectives if c.moves)

    @property
    def transfer_bytes(self) -> int:
        """Bytes that the transfer brings to a rank."""
        return sum(c.collective.bytes_received for c in self.transfers)

    @property
    def overlapped_share(self) -> float | None:
        """Share of the transfer's bytes that compute hides; None where nothing is transferred."""
        hidden = sum(c.collective.bytes_received for c in self.transfers if c.hidden)
        return hidden / self.transfer_bytes if self.transfer_bytes else None

    def check_independent(self) -> None:
        """Raise ValueError, naming both, when a transfer waits for compute of the layer beside it."""
        for c in self.transfers:
            if c.needs:
                raise ValueError(
                    f"the transfer {self.order[c.start].name} ({c.collective.kind}) waits for {', '.join(c.needs)} of "
                    f"the layer beside it."
                )


def read_schedule(compiled: Any) -> Schedule:
    """The schedule of a compiled program, given itself or as its HLO text. Raises ValueError when it has none."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError("this HLO text is not scheduled: read it from a compiled program.")
    bodies, entry = _computations(text)
    reader = _Reader(bodies, bodies[entry], rank_count(text))
    return reader.read()


def _computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Every computation of a module by name, and the name of its entry."""
    bodies: dict[str, list[Instruction]] = {}
    entry, body = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            body = bodies.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            body = None
        elif body is not None and (it := read_instruction(line)):
            body.append(it)
    if not entry:
        raise ValueError("this HLO text has no ENTRY computation.")
    return bodies, entry


class _Reader:
    """The working state of one `read_schedule`."""

    def __init__(self, bodies: dict[str, list[Instruction]], order: list[Instruction], ranks: int) -> None:
        self.bodies, self.order, self.ranks = bodies, order, ranks
        self.index = {it.name: i for i, it in enumerate(order)}
        self.operands = [[self.index[w] for w in _operands(it.rest) if w in self.index] for it in order]
        self.compute = {i: scope for i, it in enumerate(order) if (scope := self._compute_scope(it))}

    def read(self) -> Schedule:
        found = []
        for i, it in enumerate(self.order):
            kind, phase = self._collective_kind(it)
            if kind is None or phase == "done":
                continue
            done = i if phase == "" else self._done_of(i)
            inner = self._wrapped(it) if it.op in _WRAPPERS else None
            rest = inner.rest if inner else it.rest
            collective = collective_of(kind, self.order[done].type, rest, self.ranks)
            beside = tuple(self.order[j].name for j in range(i + 1, done) if j in self.compute)
            sync = phase == "" or '"is_sync":true' in it.rest
            found.append(
                Scheduled(
                    collective=collective,
                    asynchronous=not sync,
                    start=i,
                    done=done,
                    beside=beside,
                    needs=tuple(self._needs(i)),
                )
            )
        return Schedule(tuple(self.order), tuple(found), self.compute)

    def _collective_kind(self, it: Instruction) -> tuple[str | None, str]:
        """(kind, phase) of a collective's line: phase is "start", "done" or "" where it is not split."""
        if it.op in RECEIVED:
            return it.op, ""
        kind, _, phase = it.op.rpartition("-")
        if kind in RECEIVED and phase in ("start", "done"):
            return kind, phase
        if it.op in _WRAPPERS and (inner := self._wrapped(it)):
            return inner.op, _WRAPPERS[it.op]
        return None, ""

    def _wrapped(self, it: Instruction) -> Instruction | None:
        """The collective inside a computation that an instruction calls."""
        return next((x for called in self._called(it) for x in self.bodies[called] if x.op in RECEIVED), None)

    def _done_of(self, start: int) -> int:
        for j in range(start + 1, len(self.order)):
            if self.order[j].op.endswith("-done") and start in self.operands[j]:
                return j
        raise ValueError(f"no line after {self.order[start].name} ends what it starts.")

    def _called(self, it: Instruction) -> list[str]:
        return [word for word in it.words() if word in self.bodies]

    def _scopes(self, it: Instruction) -> set[str]:
        """Scopes of what computes in an instruction and in all that it calls; parameters' names are none."""
        found, pending, seen = set(), [it], set()
        while pending:
            x = pending.pop()
            if x.op not in _FREE and not x.scope.startswith("args["):
                found.add(x.scope)
            for name in self._called(x):
                if name not in seen:
                    seen.add(name)
                    pending += self.bodies[name]
        return found - {""}

    def _compute_scope(self, it: Instruction) -> str:
        """The scope of compute that does not belong to a transfer alone; "" for everything else."""
        if it.op in _FREE or it.op.endswith(("-start", "-done")) or self._collective_kind(it)[0]:
            return ""
        foreign = [scope for scope in self._scopes(it) if MOVE not in scope]
        return (it.scope if it.scope in foreign else min(foreign)) if foreign else ""

    def _needs(self, start: int) -> list[str]:
        """Compute outside `MOVE` on the way from the program's parameters to an instruction."""
        found, pending, seen = [], list(self.operands[start]), set()
        while pending:
            i = pending.pop()
            if i in seen:
                continue
            seen.add(i)
            if i in self.compute:
                found.append(self.order[i].name)
            else:
                pending += self.operands[i]
        return sorted(found)


def _operands(rest: str) -> list[str]:
    """Words of the operand list: what stands before its closing parenthesis."""
    depth = 1
    for i, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return re.findall(r"[\w.\-]+", rest[:i])
    return re.findall(r"[\w.\-]+", rest)
