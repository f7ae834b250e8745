"""A long random life: requests come, end and are given up at every point while the layout changes under them."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from splash_jax import LLM
from splash_jax.scheduler import Request
from tests.engine.conftest import TOLERANCE, add, greedy, teacher_forced, tokens
from tests.support import LAYOUTS, assert_all_free, make_llm


def walk(llm: LLM, switches: int, seed: int, modes: Sequence[str] = ("splash",)) -> list[Request]:
    """Random traffic with so many switches, each in one of `modes`; returns every request there was."""
    rng, engine = random.Random(seed), llm.engine
    requests: list[Request] = []
    asked, layout = 0, llm.layout

    def each(step: int) -> None:
        nonlocal asked, layout
        if asked < switches:
            alive = [r for r in requests if r.finish_reason is None]
            for _ in range(rng.choice((0, 0, 1, 1, 2)) if len(alive) < 10 else 0):
                length = rng.choice((1, 2, 4, 5, 16, 23, 47, 70))
                requests.append(add(llm, tokens(length, len(requests)), greedy(rng.choice((1, 2, 9, 20)), logprobs=0)))
            if alive and rng.random() < 0.1:
                engine.abort(rng.choice(alive).name)
            if step == 0 or rng.random() < 0.8:
                layout = rng.choice([name for name in LAYOUTS if name != layout])
                engine.request_switch(layout, rng.choice(modes))
                asked += 1

    add_first = add(llm, tokens(5, 10_000), greedy(3, logprobs=0))
    requests.append(add_first)
    for step in range(100_000):
        each(step)
        if asked == switches and not engine.busy:
            break
        engine.step()
        engine.pool.check()
    return requests


def judge(llm: LLM, alone: LLM, requests: list[Request], switches: int, since: int) -> None:
    """Every finished request against a single device; everything given back."""
    plans = [r.switch for r in llm.records[since:] if r.switch]
    assert len(plans) == switches
    assert sum(bool(plan.before.requests) for plan in plans) > 0.8 * switches
    finished = [r for r in requests if r.finish_reason == "length"]
    assert len(finished) > len(requests) / 2
    for request in requests:
        llm.engine.take(request.name)
        assert request.finish_reason in ("length", "abort")
        values = np.asarray([p for p, _ in request.logprobs])
        if len(values):
            known = teacher_forced(alone, request.prompt_ids, request.output_ids)
            np.testing.assert_allclose(values, known, rtol=0, atol=TOLERANCE)
    for request in finished:
        assert request.total == request.max_total
    assert_all_free(llm)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_walk_of_24_switches(llm: LLM, alone: LLM, seed: int) -> None:
    since = len(llm.records)
    judge(llm, alone, walk(llm, 24, seed), 24, since)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (4, 8))
def test_a_walk_of_200_switches_over_all_directions(
    request: pytest.FixtureRequest, small: Path, alone: LLM, ranks: int
) -> None:
    llm = request.getfixturevalue("llm") if ranks == 4 else make_llm(small, num_devices=ranks, compile_ahead=True)
    since = len(llm.records)
    judge(llm, alone, walk(llm, 200, ranks), 200, since)
    plans = [record.switch for record in llm.records[since:] if record.switch]
    assert len({(str(plan.before.layout), str(plan.after.layout)) for plan in plans}) == 12
    assert llm.engine.programs.sealed
