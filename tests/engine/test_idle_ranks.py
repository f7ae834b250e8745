"""S02: a rank without rows enters every exchange, and no request's features change which exchanges there are."""

import numpy as np
import pytest

from splash_jax import LLM, SamplingParams
from splash_jax.engine import StepRecord
from tests.engine.conftest import TOLERANCE, add, drive, go, greedy, tokens
from tests.support import EACH_LAYOUT, max_logprob_difference

OWNERS = ("dp", "dop")
OWNED = pytest.mark.parametrize("layout", OWNERS)


def serve(llm: LLM, lengths: list[int], new: list[int], **settings: object) -> tuple[list, list[StepRecord]]:
    records: list[StepRecord] = []
    prompts = [tokens(n, 300 + i) for i, n in enumerate(lengths)]
    params = [greedy(n, logprobs=2, **settings) for n in new]
    return llm.generate(prompts, params, on_step=records.append), records


@OWNED
@pytest.mark.parametrize(
    ("lengths", "new"),
    [([5], [12]), ([5, 9, 2], [6, 6, 6]), ([4, 4, 4, 4, 6], [2, 2, 2, 2, 120]), ([60, 3, 3], [4, 20, 20])],
    ids=["one request", "fewer than ranks", "one outlives the rest", "one rank prefills"],
)  # fmt: skip
def test_idle_ranks_are_counted_and_change_nothing(llm: LLM, layout: str, lengths: list[int], new: list[int]) -> None:
    expected, _ = serve(go(llm, "tp"), lengths, new)
    outputs, records = serve(go(llm, layout), lengths, new)
    for a, b in zip(outputs, expected, strict=True):
        assert max_logprob_difference(a, b) <= TOLERANCE
    for record in records:
        assert record.running_by_home.count(0) <= record.idle_ranks <= 3
    steady = [r for r in records if r.rows == r.drawn == sum(r.running_by_home)]
    assert steady and all(r.idle_ranks == r.running_by_home.count(0) for r in steady)


def test_layouts_without_owners_have_no_idle_rank(llm: LLM) -> None:
    for layout in ("tp", "cp"):
        _, records = serve(go(llm, layout), [5], [4])
        assert {r.idle_ranks for r in records} == {0}


@OWNED
def test_an_idle_engine_goes_on_when_a_request_comes(llm: LLM, layout: str) -> None:
    first, _ = serve(go(llm, layout), [3, 3, 3, 3], [5, 5, 5, 5])
    assert not llm.engine.busy
    before = len(llm.records)
    llm.engine.step()  # nothing to do is no step
    assert len(llm.records) == before
    again, records = serve(llm, [3], [5])
    assert max_logprob_difference(again[0], first[0]) <= TOLERANCE
    assert len(records) == 5


@OWNED
@pytest.mark.parametrize(
    "feature",
    [{"logprobs": 5}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.5}, {"min_tokens": 3, "ignore_eos": False},
     {"temperature": 0.8, "seed": 1, "top_k": 5}],
    ids=lambda f: next(iter(f)),
)  # fmt: skip
def test_one_requests_feature_asks_no_other_program(llm: LLM, layout: str, feature: dict[str, object]) -> None:
    asked: list[list[str]] = []
    for settings in ({}, feature):
        names: list[str] = []
        programs, get = go(llm, layout).engine.programs, llm.engine.programs.get
        programs.get = lambda key, names=names, get=get: names.append(str(key)) or get(key)  # type: ignore[method-assign]
        try:
            mine = SamplingParams(**({"temperature": 0.0, "max_tokens": 6, "ignore_eos": True} | settings))  # type: ignore[arg-type]
            outputs = llm.generate([tokens(5, 1), tokens(4, 2), tokens(3, 3)], [mine, greedy(6), greedy(6)])
        finally:
            del programs.get  # type: ignore[attr-defined]
        asked.append([name for name in names if name != "reset slot"])  # local to every rank: no exchange in it
        asked[-1].append(str([o.outputs[0].token_ids for o in outputs[1:]]))
    assert asked[0] == asked[1]


@pytest.mark.parametrize("dst", EACH_LAYOUT)
def test_a_switch_while_ranks_are_idle(llm: LLM, dst: str) -> None:
    expected, _ = serve(go(llm, "tp"), [6], [10])
    for src in OWNERS:
        if src == dst:
            continue
        request = add(go(llm, src), tokens(6, 300), greedy(10, logprobs=0))
        drive(llm, lambda step: step == 4 and llm.engine.request_switch(dst))
        llm.engine.take(request.name)
        assert request.output_ids == list(expected[0].outputs[0].token_ids)
        values = [v[i].logprob for i, v in zip(request.output_ids, expected[0].outputs[0].logprobs, strict=True)]
        np.testing.assert_allclose([p for p, _ in request.logprobs], values, rtol=0, atol=TOLERANCE)


def test_a_switch_of_an_empty_engine(llm: LLM) -> None:
    expected, _ = serve(go(llm, "tp"), [6], [4])
    for layout in ("dop", "tp", "cp", "dp"):
        plan = llm.switch(layout)
        assert str(plan.after.layout) == llm.layout == layout and not plan.before.requests
        drive(llm)
        outputs, _ = serve(llm, [6], [4])
        assert max_logprob_difference(outputs[0], expected[0]) <= TOLERANCE
