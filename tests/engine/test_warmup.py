"""S20: what is compiled ahead serves everything, and neither compiling nor idle ranks touch a live page."""

from collections import Counter

import numpy as np
import pytest

from splash_jax import LLM
from splash_jax.errors import ProgramMissing
from splash_jax.runtime import StepKey
from tests.engine.conftest import add, drive, go, greedy, stored_slots, tokens
from tests.support import EACH_LAYOUT


def stored_bytes(llm: LLM, requests: list) -> list[bytes]:
    """What every pool holds in the slots of these requests."""
    slots = np.asarray([slot for r in requests for _, *slot in stored_slots(llm, r)]).T
    return [np.asarray(pool)[tuple(slots)].tobytes() for pool in llm.engine.state.pools]


def test_a_day_of_lengths_and_switches_compiles_nothing(llm: LLM) -> None:
    programs = llm.engine.programs
    compiled = programs.compiled
    assert programs.sealed and compiled == len(set(llm.engine.blueprint.keys()))
    for i, (src, dst) in enumerate(llm.engine.blueprint.directions()):
        go(llm, str(src))
        lengths = (1 + 7 * i % 40, 2 + 19 * i % 90, 200)[: 1 + i % 3]
        llm.generate([tokens(n, n) for n in lengths], greedy(5), switches={2 + i % 4: str(dst)})
        llm.logits(tokens(1 + 17 * i % 130, i))
    llm.generate([tokens(2, 2)] * 3, greedy(4, repetition_penalty=1.5, logprobs=20, min_tokens=2))
    assert programs.sealed and programs.compiled == compiled


def test_a_program_that_was_not_announced_is_an_error_that_names_it(llm: LLM) -> None:
    blueprint = llm.engine.blueprint
    layout = blueprint.layouts["dop"]
    key = StepKey(part="moe", layout=layout, bucket=blueprint.buckets[layout][0], pages=blueprint.pages[layout] + 1)
    with pytest.raises(ProgramMissing, match=r"no program was compiled for moe dop 2\+0x16"):
        llm.engine.programs.get(key)


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_compiling_and_warming_up_leave_live_pages_alone(llm: LLM, layout: str) -> None:
    engine = go(llm, layout).engine
    requests = [add(llm, tokens(n, n), greedy(30)) for n in (3, 18)]
    for _ in range(6):
        engine.step()
    before = stored_bytes(llm, requests)
    engine.programs.prepare(engine.blueprint.keys())
    assert stored_bytes(llm, requests) == before
    drive(llm)
    for request in requests:
        engine.take(request.name)


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_a_step_writes_only_the_slots_of_its_own_rows(llm: LLM, layout: str) -> None:
    """Idle ranks and padding rows enter every program; nothing they do may reach a page."""
    engine = go(llm, layout).engine
    requests = [add(llm, tokens(n, n), greedy(14)) for n in (3, 18, 1)]
    changed: Counter[int] = Counter()
    seen = [np.asarray(pool) for pool in engine.state.pools]
    while engine.busy:
        computed = {r.name: r.computed for r in requests}
        engine.step()
        allowed = np.zeros(seen[0].shape[:3], bool)
        for request in engine.scheduler.running:
            for position, *slot in stored_slots(llm, request):
                allowed[tuple(slot)] |= position >= computed[request.name]
        now = [np.asarray(pool) for pool in engine.state.pools]
        if all(r in engine.scheduler.running for r in requests):
            for old, new in zip(seen, now, strict=True):
                different = (old.view(np.int32) != new.view(np.int32)).any(-1)  # bits: free slots may hold NaN
                assert not (different & ~allowed).any()
                changed[int(different.sum())] += 1
        seen = now
    assert sum(count for slots, count in changed.items() if slots) > 10
    for request in requests:
        engine.take(request.name)
