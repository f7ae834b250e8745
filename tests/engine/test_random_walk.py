"""A long random life: requests come, end and are given up at every point while the layout changes under them."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from splash_jax import LLM
from splash_jax.runtime import execute
from splash_jax.scheduler import Request
from tests.engine.conftest import TOLERANCE, add, drive, go, greedy, teacher_forced, tokens
from tests.engine.residency import Residency
from tests.support import HYBRIDS, MESHES, assert_all_free, make_llm, write_checkpoint


def walk(llm: LLM, switches: int, seed: int, modes: Sequence[str] = ("splash",)) -> list[Request]:
    """Random traffic with so many switches, along the engine's directions, each in one of `modes`.

    Returns every request there was.
    """
    rng, engine = random.Random(seed), llm.engine
    requests: list[Request] = []
    asked, layout = 0, llm.layout
    onward: dict[str, list[str]] = {}
    for src, dst in engine.blueprint.directions():
        onward.setdefault(str(src), []).append(str(dst))

    def each(step: int) -> None:
        nonlocal asked, layout
        if asked < switches:
            alive = [r for r in requests if r.finish_reason is None]
            for _ in range(rng.choice((0, 0, 1, 1, 2)) if len(alive) < 10 else 0):
                length = rng.choice((1, 2, 4, 5, 16, 23, 47, 70))
                requests.append(add(llm, tokens(length, len(requests)), greedy(rng.choice((1, 2, 9, 20)), logprobs=0)))
            if alive and rng.random() < 0.1:
                engine.abort(rng.choice(alive).name)
            if (step == 0 or rng.random() < 0.8) and not engine._switches:  # a spread one may be under way
                layout = rng.choice(onward[layout])
                engine.request_switch(layout, rng.choice(modes))
                asked += 1

    add_first = add(llm, tokens(5, 10_000), greedy(3, logprobs=0))
    requests.append(add_first)
    with Residency(llm).watching() as residency:
        for step in range(100_000):
            each(step)
            if asked == switches and not engine.busy:
                break
            engine.step()
            engine.pool.check()
            residency.after_step()
    assert residency.switches
    residency.check()
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


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one kind of layer: half the programs."""
    return write_checkpoint(tmp_path_factory.mktemp("dense"), first_k_dense_replace=3)


@pytest.fixture(scope="module")
def dense_alone(dense: Path) -> LLM:
    return make_llm(dense, num_devices=1, layouts=("tp",))


def hybrids(checkpoint: Path, mesh: str, layouts: tuple[str, ...] = HYBRIDS, **settings: object) -> LLM:
    """An engine of two axes that compiles what it comes to need."""
    return make_llm(checkpoint, num_devices=None, mesh=MESHES[mesh], layout=layouts[0], layouts=layouts, **settings)


@pytest.mark.slow
def test_a_walk_round_three_hybrids(dense: Path, dense_alone: LLM) -> None:
    """All six roles in three layouts."""
    layouts = ("node=dop,chip=cp", "node=tp,chip=dp", "node=dcp,chip=rep")
    llm = hybrids(dense, "2x2", layouts, directions=tuple(pairwise((*layouts, layouts[0]))))
    judge(llm, dense_alone, walk(llm, 18, 0), 18, 0)


ONE_STEP, EITHER = ("splash",), ("splash", "spread")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "steps", "switches", "modes"),
    [("2x2", (1, 2, 3, 4, 5), 100, ONE_STEP), ("2x4", (1, 4), 40, ONE_STEP), ("2x2", (1, 4), 40, EITHER),
     ("2x4", (1,), 20, EITHER)],
)  # fmt: skip
def test_a_long_walk_through_hybrids(
    dense: Path, dense_alone: LLM, mesh: str, steps: tuple[int, ...], switches: int, modes: tuple[str, ...]
) -> None:
    """From each layout to those so many places further on: thirty directions, or fewer where programs are many."""
    places = range(len(HYBRIDS))
    directions = tuple((HYBRIDS[i], HYBRIDS[(i + step) % len(HYBRIDS)]) for i in places for step in steps)
    llm = hybrids(dense, mesh, directions=directions, switch_modes=modes, spread_parts=2)
    judge(llm, dense_alone, walk(llm, switches, 7, modes), switches, 0)
    assert {record.switch_mode for record in llm.records if record.switch} == set(modes)
    plans = [record.switch for record in llm.records if record.switch]
    assert len({(str(plan.before.layout), str(plan.after.layout)) for plan in plans}) > 0.8 * len(directions)


def test_the_walk_notices_a_source_that_is_kept(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    monkeypatch.setattr(execute, "free", lambda arrays: kept.append(arrays))
    add(go(llm, "cp"), tokens(9, 1), greedy(4))
    with Residency(llm).watching() as residency:
        llm.engine.request_switch("dop")
        llm.engine.step()
    with pytest.raises(AssertionError, match="bytes are left over after a step in dop"):
        residency.after_step()
    with pytest.raises(AssertionError, match=r"cp -> dop: \d+ bytes on a rank, \d+ more than Eq\. 5 allows"):
        residency.check()
    drive(llm)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (4, 8))
def test_a_walk_of_200_switches_over_all_directions(
    request: pytest.FixtureRequest, small: Path, alone: LLM, ranks: int
) -> None:
    """All thirty on four ranks, twelve on eight: one process cannot hold many more programs."""
    llm = request.getfixturevalue("llm") if ranks == 4 else make_llm(small, num_devices=ranks)
    since = len(llm.records)
    judge(llm, alone, walk(llm, 200, ranks), 200, since)
    plans = [record.switch for record in llm.records[since:] if record.switch]
    assert len({(str(plan.before.layout), str(plan.after.layout)) for plan in plans}) == (30 if ranks == 4 else 12)
    assert llm.engine.programs.sealed is (ranks == 4)
