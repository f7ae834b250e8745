"""Ctrl-C ends a call, not the engine: the step it falls into is finished first."""

import signal
import threading
from collections.abc import Iterator

import pytest

from splash_jax import LLM
from splash_jax.engine.interrupts import interrupts_held
from tests.engine.conftest import greedy
from tests.support import assert_all_free


@pytest.fixture(autouse=True)
def usual_handler() -> Iterator[None]:
    """Python's own handler, which is not there where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_generate_works_again_after_ctrl_c_in_the_middle_of_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = [output.outputs[0].token_ids for output in llm.generate([[5, 6], [7]], greedy(8))]
    dispatch, steps = llm.engine._dispatch, []

    def interrupted(*arguments):
        steps.append(len(steps))
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return dispatch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "_dispatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6], [7]], greedy(8))
    assert len(steps) == 3
    assert not llm.engine.scheduler.unfinished
    assert [output.outputs[0].token_ids for output in llm.generate([[5, 6], [7]], greedy(8))] == want
    assert_all_free(llm)


def test_nothing_stays_queued_after_ctrl_c_between_two_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    add, added = llm.engine.add_request, []

    def interrupted(*arguments, **named):
        if added:
            signal.raise_signal(signal.SIGINT)
        added.append(arguments)
        return add(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "add_request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6], [7]], greedy(8))
    assert len(added) == 1
    assert not llm.engine.scheduler.unfinished
    assert_all_free(llm)


def test_a_second_ctrl_c_does_not_wait() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        reached.append("after the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("after the second")
    assert reached == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_and_other_handlers_are_left_alone() -> None:
    found = []

    def look() -> None:
        with interrupts_held():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    look()
    signal.signal(signal.SIGINT, before)
    assert found == [before, signal.SIG_IGN]
