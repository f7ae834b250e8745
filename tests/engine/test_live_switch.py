"""S01: a switch, in any direction and at any moment, changes no output and costs no request anything."""

import itertools
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from splash_jax import LLM, RequestOutput
from splash_jax.engine import StepRecord
from tests.engine.conftest import GAP, LENGTHS, NEW_TOKENS, TOLERANCE, go, greedy, mixed_prompts, smallest_gap
from tests.support import DIRECTIONS, EACH_LAYOUT, USUAL, assert_all_free, max_logprob_difference

PROMPTS = mixed_prompts(54)  # seeds whose best two tokens are everywhere further apart than GAP
PLAIN_PROMPTS = mixed_prompts(54)
WALK = 30  # switches, and the new tokens of the requests that live through them


def decodes(record: StepRecord) -> bool:
    return record.rows == record.drawn


MOMENTS = {  # of the records of a run, r, and a step's place in them, i
    "prefill chunk": lambda r, i: r[i].rows - r[i].drawn >= 8,
    "admission": lambda r, i: r[i].waiting < r[i - 1].waiting,
    "first decode": lambda r, i: decodes(r[i]) and r[i].drawn == len(LENGTHS),
    "mid decode": lambda r, i: i == len(r) // 2,
    "last token": lambda r, i: decodes(r[i]) and r[i + 1].drawn < r[i].drawn,
    "after an end": lambda r, i: decodes(r[i - 1]) and r[i].drawn < r[i - 1].drawn,
}


@dataclass(frozen=True)
class Run:
    outputs: list[RequestOutput]
    records: list[StepRecord]


def run(
    llm: LLM, layout: str, prompts: list[list[int]], switches: Mapping[int, str] | None = None, new: int = NEW_TOKENS
) -> Run:
    """Six greedy requests that start in a layout."""
    go(llm, layout)
    records: list[StepRecord] = []
    outputs = llm.generate(prompts, greedy(new, logprobs=2), switches=switches, on_step=records.append)
    assert_all_free(llm)
    return Run(outputs, records)


def moment(fixed: Run, name: str) -> int:
    """The first step of a run that a moment describes, counted from the run's first."""
    records = fixed.records
    for i in range(1, len(records)):
        if MOMENTS[name]([*records, records[-1]], i):
            return i
    raise AssertionError(f"no step of the run is a {name!r}.")


def check(switched: Run, fixed: Run, switches: int, new: int = NEW_TOKENS) -> None:
    """Same tokens and log-probabilities; nothing computed twice, preempted, dropped or repeated; no history cut."""
    for a, b, length in zip(switched.outputs, fixed.outputs, LENGTHS, strict=True):
        assert max_logprob_difference(a, b) <= TOLERANCE
        assert len(a.prompt_token_ids) == length and len(a.outputs[0].token_ids) == new
        assert a.outputs[0].finish_reason == "length" and a.num_preemptions == 0 and a.error is None
    assert sum(r.rows for r in switched.records) == sum(length + new - 1 for length in LENGTHS)
    assert sum(r.drawn for r in switched.records) == new * len(LENGTHS)
    plans = [r.switch for r in switched.records if r.switch]
    assert len(plans) == switches
    for plan in plans:
        before = {name: r.num_tokens for name, r in plan.before.requests.items()}
        assert {name: r.num_tokens for name, r in plan.after.requests.items()} == before


@pytest.fixture(scope="module")
def fixed(shared: LLM) -> dict[str, Run]:
    return {layout: run(shared, layout, PROMPTS) for layout in shared.engine.blueprint.layouts}


@pytest.fixture(scope="module")
def plain_fixed(plain: LLM) -> dict[str, Run]:
    return {layout: run(plain, layout, PLAIN_PROMPTS) for layout in plain.engine.blueprint.layouts}


def switch_cases() -> list[object]:
    """All directions at all moments; by default each usual direction at every other moment."""
    usual = lambda n, src, dst: n % 2 == 0 and {src, dst} <= set(USUAL)  # noqa: E731
    cases = itertools.product(enumerate(DIRECTIONS), enumerate(MOMENTS))
    return [
        pytest.param(src, dst, when, id=f"{src}-{dst}-{when}", marks=() if usual(i + j, src, dst) else pytest.mark.slow)
        for (i, (src, dst)), (j, when) in cases
    ]


def walk(layouts: Sequence[str], length: int, seed: int, start: str) -> dict[int, str]:
    """A switch before each of the first steps, never to where one is."""
    rng, steps = random.Random(seed), {}
    for step in range(length):
        start = steps[step] = rng.choice([layout for layout in layouts if layout != start])
    return steps


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_every_layout_gives_the_same_tokens(fixed: dict[str, Run], layout: str) -> None:
    assert smallest_gap(fixed[layout].outputs) > GAP, "choose other prompts: ids would be compared within rounding."
    check(fixed[layout], fixed["tp"], switches=0)


@pytest.mark.parametrize(("src", "dst", "when"), switch_cases())
def test_a_switch_at_any_moment_changes_nothing(llm: LLM, fixed: dict[str, Run], src: str, dst: str, when: str) -> None:
    step = moment(fixed[src], when)
    switched = run(llm, src, PROMPTS, {step: dst})
    assert [r.layout for r in switched.records[step - 1 : step + 1]] == [src, dst]
    assert len(switched.records[step].switch.before.requests) > 0  # type: ignore[union-attr]
    check(switched, fixed[src], switches=1)


def test_a_switch_in_every_step_changes_nothing(llm: LLM) -> None:
    fixed = run(llm, "tp", PROMPTS, new=WALK)
    assert smallest_gap(fixed.outputs) > GAP
    for seed in range(2):
        switched = run(llm, "tp", PROMPTS, walk(tuple(llm.engine.blueprint.layouts), WALK, seed, "tp"), new=WALK)
        check(switched, fixed, WALK, new=WALK)


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_layouts_agree_without_a_query_rank_and_with_positions_dealt_singly(
    plain_fixed: dict[str, Run], layout: str
) -> None:
    assert smallest_gap(plain_fixed[layout].outputs) > GAP
    check(plain_fixed[layout], plain_fixed["tp"], switches=0)


@pytest.mark.parametrize("src", EACH_LAYOUT)
def test_a_tour_of_all_directions_with_positions_dealt_singly(
    plain_llm: LLM, plain_fixed: dict[str, Run], src: str
) -> None:
    others = [layout for layout in plain_llm.engine.blueprint.layouts if layout != src]
    tour = list(itertools.chain.from_iterable((dst, src) for dst in others))
    switched = run(plain_llm, src, PLAIN_PROMPTS, {2 + 2 * i: dst for i, dst in enumerate(tour)})
    check(switched, plain_fixed[src], switches=len(tour))


def test_another_thread_may_switch_while_requests_run(llm: LLM, fixed: dict[str, Run]) -> None:
    go(llm, "tp")
    plans, started = [], threading.Event()

    def switching() -> None:
        started.wait()
        for layout in ("dop", "cp", "dp"):
            plans.append(llm.switch(layout))

    other = threading.Thread(target=switching)
    other.start()
    records: list[StepRecord] = []

    def on_step(record: StepRecord) -> None:
        started.set()
        records.append(record)

    outputs = llm.generate(PROMPTS, greedy(logprobs=2), on_step=on_step)
    other.join()
    assert [str(plan.after.layout) for plan in plans] == ["dop", "cp", "dp"]
    assert any(plan.before.requests for plan in plans), "every switch came after the last request."
    check(Run(outputs, llm.records[-len(records) :]), fixed["tp"], switches=sum(r.switch is not None for r in records))
