"""S14: a request that gave its pages back and was computed again says what it would have said."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from splash_jax import LLM, SamplingParams
from splash_jax.engine import EngineConfig, draw_up
from splash_jax.ownership.footprint import IN_TRANSIT, projection_bytes
from splash_jax.scheduler import Request
from tests.engine.conftest import TOLERANCE, Ballast, add, drive, go, greedy, tokens
from tests.support import EACH_LAYOUT, assert_all_free, make_llm

PROMPTS = [tokens(16, 800 + i) for i in range(4)]
PARAMS = [
    greedy(24, logprobs=0),
    greedy(24, logprobs=0, repetition_penalty=1.2, frequency_penalty=0.3),
    greedy(24, logprobs=3),
    SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True, logprobs=0),
]


def finish(llm: LLM, each: Callable[[int, list[Request]], None] | None = None, copies: int = 1) -> list[Request]:
    requests = [add(llm, prompt, p) for _ in range(copies) for prompt, p in zip(PROMPTS, PARAMS, strict=True)]
    drive(llm, None if each is None else lambda step: each(step, requests))
    for request in requests:
        llm.engine.take(request.name)
    return requests


def same(requests: list[Request], expected: list[Request]) -> None:
    """Tokens, their number, log-probabilities and reasons; `expected` may be repeated."""
    for i, request in enumerate(requests):
        other = expected[i % len(expected)]
        assert request.output_ids == other.output_ids
        assert request.finish_reason == other.finish_reason == "length"
        assert len(request.logprobs) == 24
        for (own, top), (other_own, other_top) in zip(request.logprobs, other.logprobs, strict=True):
            assert abs(own - other_own) <= TOLERANCE
            assert [i for i, _ in top] == [i for i, _ in other_top]


@pytest.fixture(scope="module")
def unpressed(shared: LLM) -> list[Request]:
    return finish(go(shared, "tp"))


def squeeze(llm: LLM, times: int, first: int, switch: str | None = None) -> tuple[Callable, Ballast]:
    """Take all free pages away at step `first` and every six steps after, until it has cost `times` preemptions."""
    ballast, start = Ballast(llm), llm.engine.preemptions

    def each(step: int, requests: list[Request]) -> None:
        if ballast.names and llm.engine.preemptions > start + each.done:  # type: ignore[attr-defined]
            ballast.release()
            each.done = llm.engine.preemptions - start  # type: ignore[attr-defined]
        if switch and step == first - 1:
            llm.engine.request_switch(switch)
        if step >= first and (step - first) % 6 == 0 and each.done < times and not ballast.names:  # type: ignore[attr-defined]
            ballast.fill(leave=0)

    each.done = 0  # type: ignore[attr-defined]
    return each, ballast


@pytest.mark.parametrize("times", (0, 1, 3))
@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_any_number_of_preemptions_changes_nothing(llm: LLM, unpressed: list[Request], layout: str, times: int) -> None:
    before = go(llm, layout).engine.preemptions
    each, ballast = squeeze(llm, times, first=6)
    requests = finish(llm, each)
    assert not ballast.names
    # Where requests have owners, each owner's own request may give way in one step.
    happened = llm.engine.preemptions - before
    assert happened == sum(r.preemptions for r in requests)
    assert (happened == 0) if times == 0 else (happened >= times)
    same(requests, unpressed)


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_preemption_right_after_a_switch(llm: LLM, unpressed: list[Request], layout: str) -> None:
    go(llm, "dp" if layout == "tp" else "tp")
    before = llm.engine.preemptions
    each, ballast = squeeze(llm, 1, first=8, switch=layout)
    requests = finish(llm, each)
    assert llm.layout == layout and not ballast.names
    assert llm.engine.preemptions > before
    same(requests, unpressed)


def test_preemption_of_a_request_whose_prompt_is_half_computed(llm: LLM) -> None:
    go(llm, "dp")  # its chunks are 16 rows: a prompt of 50 takes four steps
    prompts = [tokens(3, 1), *(tokens(50, 9) for _ in range(3)), tokens(50, 9)]
    expected = llm.generate(prompts, greedy(12, logprobs=0))
    requests = [add(llm, prompt, greedy(12, logprobs=0)) for prompt in prompts]
    ballast, halves = Ballast(llm), []

    def each(step: int) -> None:
        halves.extend(r.name for r in requests if r.preemptions and not r.output_ids)
        if step == 2:
            ballast.fill(leave=0)
        if ballast.names and any(r.preemptions for r in requests):
            ballast.release()

    drive(llm, each)
    assert halves, "no request was preempted before its first token: the test tests nothing."
    for request, output in zip(requests, expected, strict=True):
        llm.engine.take(request.name)
        assert request.output_ids == list(output.outputs[0].token_ids)


def bytes_for(checkpoint: Path, layout: str, pages: int, **settings: Any) -> int:
    """The least memory that gives a layout so many pages per rank."""
    own: dict[str, Any] = {"num_devices": 4, "layout": layout, "layouts": (layout,), "dtype": "float32"}
    plan = draw_up(EngineConfig(model=checkpoint, **own, **settings))
    state, kv = plan.state, plan.shapes.kv
    fixed = state.common + projection_bytes(state, plan.layouts[layout]) + state.projections
    return fixed + pages * kv.page_size * kv.bytes_per_token * (state.num_layers + IN_TRANSIT)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_a_pool_for_two_and_a_half_requests_serves_four(small: Path, unpressed: list[Request], layout: str) -> None:
    """Four requests of 40 tokens, 10 pages each; where they have owners, four on every rank."""
    owners = 4 if layout in ("dp", "dop") else 1
    pages = {"cp": 7, "dcp": 7}.get(layout, 25)  # a quarter of every request is on a rank
    settings = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 4 * owners, "max_num_batched_tokens": 64}
    budget = bytes_for(small, layout, pages, **settings)
    llm = make_llm(small, layout=layout, layouts=(layout,), device_memory_bytes=budget, scoring=False,
                   compile_ahead=True, **(settings | {"decode_buckets": (4 * owners,)}))  # fmt: skip
    assert llm.engine.pool.pages_per_rank == pages
    requests = finish(llm, copies=owners)
    assert llm.engine.preemptions > 0
    assert sum(r.preemptions for r in requests) == llm.engine.preemptions
    same(requests, unpressed)
    assert_all_free(llm)
