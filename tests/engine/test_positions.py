"""S09, S03: who holds position p, and that nobody reads a slot that holds nothing."""

from collections import Counter

import numpy as np
import pytest

from splash_jax import LLM
from splash_jax.scheduler import Request
from tests.engine.conftest import TOLERANCE, add, drive, go, greedy, poison_unstored, stored_slots, tokens
from tests.support import EACH_LAYOUT

LENGTHS = (1, 3, 4, 5, 15, 16)
BORDERS = 13  # new tokens: they cross three page borders
PROMPTS = [tokens(n, 54 + n) for n in LENGTHS]


@pytest.fixture(params=["page", "single"])
def dealt(request: pytest.FixtureRequest) -> LLM:
    """Engines that deal positions out by whole pages and one by one."""
    return request.getfixturevalue("llm" if request.param == "page" else "plain_llm")


def expected_ranks(layout: str, home: int, position: int, interleave: int, ranks: int) -> set[int]:
    """Who holds a position, by the words of the design."""
    if layout in ("tp", "rep"):
        return set(range(ranks))
    return {(home + position // interleave) % ranks} if layout in ("cp", "dcp") else {home}


def queue(llm: LLM) -> list[Request]:
    return [add(llm, prompt, greedy(BORDERS, logprobs=0)) for prompt in PROMPTS]


def take(llm: LLM, requests: list[Request]) -> list[tuple[list[int], np.ndarray]]:
    """(tokens, their log-probabilities) of finished requests."""
    for request in requests:
        llm.engine.take(request.name)
    return [(r.output_ids, np.asarray([p for p, _ in r.logprobs])) for r in requests]


def history(llm: LLM, request: Request) -> np.ndarray:
    """What is stored of a request, [layer, position, width], from whichever rank holds it."""
    by_position = {position: slot for position, *slot in stored_slots(llm, request)}
    index = np.asarray([by_position[p] for p in range(len(by_position))]).T
    return np.stack([np.asarray(pool)[tuple(index)] for pool in llm.engine.state.pools])


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_every_position_is_held_where_the_layout_says_and_no_slot_twice(dealt: LLM, layout: str) -> None:
    engine = go(dealt, layout).engine
    requests, interleave = queue(dealt), engine.config.interleave

    def look(step: int) -> None:
        owners: Counter[tuple[int, int, int]] = Counter()
        for request in engine.scheduler.running:
            held: dict[int, list[int]] = {}
            for position, *slot in stored_slots(dealt, request):
                held.setdefault(position, []).append(slot[0])
                owners[tuple(slot)] += 1
            assert sorted(held) == list(range(request.computed))
            home = engine.pool.home(request.name)
            for position, ranks in held.items():
                assert sorted(ranks) == sorted(expected_ranks(layout, home, position, interleave, 4))
        assert set(owners.values()) <= {1}

    drive(dealt, look)
    take(dealt, requests)


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_what_is_stored_for_a_position_is_what_one_device_stores(llm: LLM, alone: LLM, layout: str) -> None:
    stored = []
    for engine_of in (alone, go(llm, layout)):
        request = add(engine_of, tokens(23, 5), greedy(16))
        while request.computed < 37:
            engine_of.engine.step()
        stored.append(history(engine_of, request)[:, :37])
        engine_of.engine.abort(request.name)
        drive(engine_of)
        engine_of.engine.take(request.name)
    np.testing.assert_allclose(stored[1], stored[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_a_slot_that_holds_nothing_is_never_read(dealt: LLM, layout: str) -> None:
    requests = queue(go(dealt, layout))
    drive(dealt)
    clean = take(dealt, requests)
    requests = queue(dealt)
    drive(dealt, lambda step: poison_unstored(dealt))
    for (ids, values), (clean_ids, clean_values) in zip(take(dealt, requests), clean, strict=True):
        assert ids == clean_ids and len(ids) == BORDERS
        np.testing.assert_allclose(values, clean_values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("src", EACH_LAYOUT)
def test_a_switch_never_carries_what_nobody_stored(dealt: LLM, src: str) -> None:
    requests = queue(go(dealt, "tp"))
    drive(dealt)
    clean = take(dealt, requests)
    requests = queue(go(dealt, src))
    route = [layout for other in dealt.engine.blueprint.layouts if other != src for layout in (other, src)]

    def each(step: int) -> None:
        poison_unstored(dealt)
        if step > 0 and route:
            dealt.engine.request_switch(route.pop(0))

    drive(dealt, each)
    assert not route
    for (ids, values), (clean_ids, clean_values) in zip(take(dealt, requests), clean, strict=True):
        assert ids == clean_ids
        np.testing.assert_allclose(values, clean_values, rtol=0, atol=TOLERANCE)
