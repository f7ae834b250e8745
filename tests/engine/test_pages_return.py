"""S04: whatever way a request ends, its pages and slot come back and nothing of it is kept."""

import gc
import random
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from splash_jax import LLM, SamplingParams
from splash_jax.errors import RequestError
from splash_jax.scheduler import Request, Status
from tests.engine.conftest import Ballast, add, drive, go, greedy, tokens
from tests.support import EACH_LAYOUT, assert_all_free, make_llm

EXITS = ("length", "stop id", "queued", "between chunks", "decoding", "preempted", "refused")


@dataclass
class Traffic:
    """Requests, each with the way it shall end."""

    llm: LLM
    rng: random.Random
    meant: dict[str, str] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)

    def come(self, exit: str) -> None:
        serial = len(self.meant)
        if exit == "refused":
            with pytest.raises(RequestError):
                add(self.llm, [9999])
            self.meant[f"refused {serial}"] = self.ended[f"refused {serial}"] = exit
            return
        length = 50 if exit == "between chunks" else self.rng.choice((1, 3, 9, 18))
        params = greedy(self.rng.choice((1, 2, 7)))
        if exit == "stop id":
            params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=list(range(0, 512, 2)))
        elif exit not in ("length",):
            params = greedy(30)
        request = add(self.llm, tokens(length, serial), params)
        self.meant[request.name] = exit
        self.requests.append(request)

    def leave(self) -> None:
        """Abort everyone who is where his exit is meant to be."""
        for request in [r for r in self.requests if r.finish_reason is None]:
            here = {
                "queued": request.status is Status.WAITING and not request.preemptions,
                "between chunks": 0 < request.computed < len(request.prompt_ids),
                "decoding": len(request.output_ids) > 2,
                "preempted": request.preemptions > 0 and request.status is Status.WAITING,
            }
            meant = self.meant[request.name]
            if here.get(meant) or (meant != "stop id" and len(request.output_ids) > 20):
                self.ended[request.name] = meant if here.get(meant) else "decoding"
                self.llm.engine.abort(request.name)

    def outlasts_a_step(self) -> bool:
        """Whether someone is there who will not end in the next step."""
        alive = [r for r in self.requests if r.finish_reason is None and r.name not in self.ended]
        return any(r.max_total - r.total > 2 for r in alive if self.meant[r.name] != "stop id")


def serve(llm: LLM, count: int, seed: int) -> Traffic:
    """So many short requests with every exit, a switch in every third step and pages now and then scarce."""
    rng, engine = random.Random(seed), llm.engine
    traffic, ballast = Traffic(llm, rng), Ballast(llm)
    step = 0
    while engine.busy or len(traffic.meant) < count:
        for _ in range(rng.choice((0, 1, 2, 5))):
            if len(traffic.meant) < count and len(engine.scheduler.waiting) < 8:
                traffic.come(EXITS[len(traffic.meant) % len(EXITS)])
        traffic.leave()
        if step % 12 >= 9 and traffic.outlasts_a_step():
            if not ballast.names:
                ballast.fill(leave=0)
        else:
            ballast.release()
            if step % 3 == 0:
                engine.request_switch(rng.choice([name for name in engine.blueprint.layouts if name != llm.layout]))
        engine.step()
        engine.pool.check()
        step += 1
        assert step < 100 * count, "the engine makes no progress."
    return traffic


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_every_exit_gives_everything_back(llm: LLM, count: int) -> None:
    since, first = len(llm.records), len(llm.engine._requests)
    traffic = serve(llm, count, seed=count)
    reasons = {r.name: r.finish_reason for r in traffic.requests}
    assert set(reasons.values()) == {"length", "stop", "abort"}
    assert set(traffic.ended.values()) == {"queued", "between chunks", "decoding", "preempted", "refused"}
    for name, how in traffic.ended.items():
        assert how == "refused" or reasons[name] == "abort"
    assert sum(r.switch is not None for r in llm.records[since:]) >= count // 8
    for request in traffic.requests:
        llm.engine.take(request.name)
    assert len(llm.engine._requests) == first, "a finished request is still known."
    assert_all_free(llm)
    assert sorted(llm.engine.scheduler._slots) == list(range(8))


@pytest.mark.parametrize("layout", EACH_LAYOUT)
@pytest.mark.parametrize("steps", range(7))
def test_an_abort_after_any_number_of_steps_frees_its_pages_at_the_next(llm: LLM, layout: str, steps: int) -> None:
    engine = go(llm, layout).engine
    other, request = add(llm, tokens(3, 1), greedy(12)), add(llm, tokens(40, 2), greedy(12))
    for _ in range(steps):
        engine.step()
    engine.abort(request.name)
    assert request.finish_reason is None
    engine.step()
    assert request.finish_reason == "abort" and request.name not in engine.pool
    drive(llm)
    assert len(other.output_ids) == 12 and other.finish_reason == "length"
    for finished in (other, request):
        engine.take(finished.name)


def test_aborting_nobody_does_nothing(llm: LLM) -> None:
    done = add(go(llm, "tp"), [5], greedy(2))
    drive(llm)
    for name in ("nobody", done.name, done.name):
        llm.engine.abort(name)
    drive(llm)
    llm.engine.take(done.name)
    assert done.finish_reason == "length"


def test_an_engine_that_nobody_holds_is_gone_at_once(small: Path) -> None:
    """Its arrays are as large as the model: they must not wait for the garbage collector."""
    llm = make_llm(small, num_devices=1, layouts=("tp",))
    llm.generate([[5, 6]], greedy(2))
    engine = weakref.ref(llm.engine)
    gc.collect()
    gc.disable()
    try:
        del llm
        assert engine() is None
    finally:
        gc.enable()
