"""Decisions as a log: written, read back, decided again; the same on two processes."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from splash_jax.errors import PolicyError
from splash_jax.scheduler import Choice, Memory, PolicyConfig, Quote, Snapshot, Switch, decide, log_line, replay

ROOT = Path(__file__).resolve().parent.parent.parent
LAYOUTS = ("tp", "cp", "dp", "node=dop,chip=cp")


def a_log(steps: int = 300, seed: int = 0) -> list[str]:
    """A run of random quotes, refusals, pins and switches, as its log."""
    rng = random.Random(seed)
    here, memory, lines = "tp", Memory(), []
    costs = dict.fromkeys(LAYOUTS, 1.0)
    for step in range(steps):
        costs = {name: cost * rng.uniform(0.9, 1.1) for name, cost in costs.items()}
        quotes = []
        for name, cost in costs.items():
            choices = tuple(Choice(cost * k, float(k * 10), 16 * k) for k in (1, 2))
            if name == here:
                quotes.append(Quote(name, choices))
            elif rng.random() < 0.1:
                quotes.append(Quote(name, (), "rank 1 lacks 3 pages"))
            else:
                quotes.append(Quote(name, choices, "", 0.1, 0.2, 0.05, 4))
        policy = PolicyConfig(pin="dp" if step % 50 == 49 else None, allowed=LAYOUTS if step % 2 else None)
        snapshot = Snapshot(
            step=step, time=step / 3, layout=here, quotes=tuple(quotes), requests=rng.randrange(3),
            waiting=rng.randrange(2),
            prompt_rows=rng.choice([0, 0, 64]), lasts=rng.choice([None, 50.0]), policy=policy,
            memory=memory,
        )  # fmt: skip
        decision = decide(snapshot)
        lines.append(log_line(snapshot, decision))
        memory = decision.memory
        here = decision.action.layout if isinstance(decision.action, Switch) else here
    return lines


def test_a_replayed_log_gives_every_decision_again():
    lines = a_log()
    decisions = list(replay(lines))
    assert len(decisions) == len(lines)
    assert len({d.reason for d in decisions}) >= 5
    assert any(isinstance(d.action, Switch) for d in decisions)


def test_every_line_tells_prediction_fit_and_reason_of_every_layout():
    for line in a_log(100):
        values = json.loads(line)
        assert "\n" not in line
        assert set(values["layouts"]) == set(LAYOUTS)
        for told in values["layouts"].values():
            assert told["why"] and isinstance(told["fits"], bool)
            assert told["seconds"] is None if not told["fits"] else told["seconds"] > 0
            assert told["chunk"] == (32 if told["fits"] else None)  # the larger one of two
        refused = [told["why"] for told in values["layouts"].values() if not told["fits"]]
        assert all("rank 1 lacks 3 pages" in why or "pin" in why for why in refused)


def test_a_log_that_was_edited_is_found():
    lines = a_log(60)
    number = next(i for i, line in enumerate(lines) if json.loads(line)["action"].startswith("switch"))
    values = json.loads(lines[number])
    values["decision"]["action"] = {"name": "run", "chunk": 16}
    lines[number] = json.dumps(values)
    with pytest.raises(PolicyError, match=rf"line {number + 1} \(step {number}, in .*\) logs run .*gives switch"):
        list(replay(lines))


@pytest.mark.parametrize("line", ["[]", "{}", '{"snapshot": {"step": 1}, "decision": 3}'])
def test_what_is_no_log_is_refused(line):
    with pytest.raises(PolicyError, match="line 1 is not a logged decision"):
        list(replay([line]))


def test_a_log_that_an_editor_saved_is_read_back():
    lines = a_log(5)
    text = "\ufeff" + "\n\n".join(lines) + "\n\n"
    assert list(replay(text.split("\n"))) == list(replay(lines))


DECIDE = """
import sys
from splash_jax.scheduler import replay
for decision in replay(sys.stdin): print(decision)
"""


def test_two_processes_fed_the_same_snapshots_decide_the_same():
    text = "\n".join(a_log())
    told = []
    for seed in ("1", "2"):  # of Python's hashes: no order of a set may decide
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", DECIDE], cwd=ROOT, env=env, input=text, capture_output=True, text=True, check=True
        )
        told.append(done.stdout)
    assert told[0] == told[1]
    assert told[0].count("Decision(") == 300
