"""Decisions as lines of JSON: what was predicted for every layout, what fitted, and why; and their replay."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from splash_jax.errors import PolicyError
from splash_jax.scheduler.policy import best_choice, decide
from splash_jax.scheduler.snapshot import (
    Choice,
    Decision,
    Idle,
    Memory,
    PolicyConfig,
    Quote,
    Run,
    Snapshot,
    Switch,
)

ACTIONS: dict[str, type[Run] | type[Switch] | type[Idle]] = {"run": Run, "switch": Switch, "idle": Idle}


def log_line(snapshot: Snapshot, decision: Decision) -> str:
    """One decision as one line of JSON, without its end of line: `layouts` to read, the rest to replay."""
    return json.dumps(
        {
            "step": snapshot.step,
            "time": snapshot.time,
            "layout": snapshot.layout,
            "action": _name(decision.action),
            "reason": decision.reason,
            "layouts": explain(snapshot, decision),
            "snapshot": _snapshot_dict(snapshot),
            "decision": _decision_dict(decision),
        },
        allow_nan=False,
    )


def explain(snapshot: Snapshot, decision: Decision) -> dict[str, dict[str, Any]]:
    """For every layout: `seconds` and `tokens` predicted with its best `chunk`, whether it `fits`, `regret` and what it
    takes, and `why`.
    """
    found: dict[str, dict[str, Any]] = {}
    remembered = decision.memory if decision.memory.layout == snapshot.layout else snapshot.memory
    for quote in snapshot.quotes:
        choice = best_choice(quote.choices, snapshot.policy.step_seconds) if quote.choices else None
        found[quote.layout] = {
            "seconds": None if choice is None else choice.seconds,
            "tokens": None if choice is None else choice.tokens,
            "chunk": None if choice is None else choice.chunk,
            "fits": not quote.refused,
            "regret": remembered.regrets.get(quote.layout),
            "there_and_back": quote.cheapest + quote.back,
            "why": _why(snapshot, decision, quote),
        }
    return found


def _why(snapshot: Snapshot, decision: Decision, quote: Quote) -> str:
    allowed, pin = snapshot.policy.allowed, snapshot.policy.pin
    chosen = decision.action.layout if isinstance(decision.action, Switch) else snapshot.layout
    if quote.layout == chosen:
        return decision.reason
    if quote.refused:
        return f"refused: {quote.refused}"
    if allowed is not None and quote.layout not in allowed:
        return "not allowed"
    if pin is not None:
        return f"{pin} is pinned"
    return f"not chosen: {decision.reason}"


def replay(lines: Iterable[str]) -> Iterator[Decision]:
    """Decide again from every line's snapshot, and yield the decisions. Empty lines are skipped.

    Raises `PolicyError` at a line that is no decision, or whose decision comes out otherwise.
    """
    for number, line in enumerate(lines, 1):
        line = line.removeprefix("\ufeff")  # an editor's byte order mark
        if not line.strip():
            continue
        snapshot, logged = _parse(line, number)
        decision = decide(snapshot)
        if decision != logged:
            raise PolicyError(
                f"line {number} (step {snapshot.step}, in {snapshot.layout}) logs {_told(logged)}, and deciding again "
                f"gives {_told(decision)}; the log was made by another version, or edited."
            )
        yield decision


def _told(decision: Decision) -> str:
    return f"{_name(decision.action)} ({decision.reason})"


def _name(action: Run | Switch | Idle) -> str:
    name = type(action).__name__.lower()
    return f"{name} {action.layout}" if isinstance(action, Switch) else name


def _parse(line: str, number: int) -> tuple[Snapshot, Decision]:
    try:
        values = json.loads(line)
        return _snapshot(values["snapshot"]), _decision(values["decision"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PolicyError(
            f"line {number} is not a logged decision: {error!r}; give lines that `log_line` wrote."
        ) from error


def _snapshot_dict(snapshot: Snapshot) -> dict[str, Any]:
    quotes = [quote._asdict() | {"choices": [c._asdict() for c in quote.choices]} for quote in snapshot.quotes]
    flat = {name: getattr(snapshot, name) for name in Snapshot.__slots__ if name not in ("quotes", "policy", "memory")}
    return flat | {"quotes": quotes, "policy": asdict(snapshot.policy), "memory": _memory_dict(snapshot.memory)}


def _memory_dict(memory: Memory) -> dict[str, Any]:
    return {name: getattr(memory, name) for name in Memory.__slots__}


def _decision_dict(decision: Decision) -> dict[str, Any]:
    action = {"name": type(decision.action).__name__.lower(), **asdict(decision.action)}
    return {"action": action, "reason": decision.reason, "memory": _memory_dict(decision.memory)}


def _snapshot(values: dict[str, Any]) -> Snapshot:
    quotes = tuple(Quote(**q | {"choices": tuple(Choice(**c) for c in q["choices"])}) for q in values["quotes"])
    policy = dict(values["policy"])
    policy["allowed"] = None if policy["allowed"] is None else tuple(policy["allowed"])
    made = {"quotes": quotes, "policy": PolicyConfig(**policy), "memory": _memory(values["memory"])}
    return Snapshot(**values | made)


def _memory(values: dict[str, Any]) -> Memory:
    known: dict[str, Any] = dict(values)
    known["load"], known["switches"] = tuple(values["load"]), tuple(values["switches"])
    return Memory(**known)


def _decision(values: dict[str, Any]) -> Decision:
    action = dict(values["action"])
    made = ACTIONS[action.pop("name")](**action)
    return Decision(action=made, reason=values["reason"], memory=_memory(values["memory"]))
