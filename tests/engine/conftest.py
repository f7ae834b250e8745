"""Engines that many tests share (compiling is what costs), and the ways tests drive and compare them."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from splash_jax import LLM, RequestOutput, SamplingParams
from splash_jax.scheduler import Request
from tests.support import LAYOUTS, USUAL, assert_all_free, make_llm, write_checkpoint

LENGTHS = (1, 3, 4, 5, 17, 40)
NEW_TOKENS = 24
TOLERANCE = 1e-4  # float32 log-probabilities: design.md, section 9
GAP = 1e-3  # ids are compared where the best two logits are further apart
_names = itertools.count()


def tokens(count: int, seed: int) -> list[int]:
    """Prompt ids that are no special tokens."""
    return [int(i) for i in np.random.default_rng(seed).integers(2, 512, count)]


def mixed_prompts(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[int(i) for i in rng.integers(2, 512, n)] for n in LENGTHS]


def greedy(max_tokens: int = NEW_TOKENS, **changes: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | changes))  # type: ignore[arg-type]


def go(llm: LLM, layout: str) -> LLM:
    """The idle engine, in a layout, the switch's own step read."""
    if llm.layout != layout:
        llm.switch(layout)
    drive(llm)
    return llm


def add(llm: LLM, prompt: Sequence[int], params: SamplingParams | None = None, **more: object) -> Request:
    """Queue a request under a fresh name."""
    return llm.engine.add_request(f"t{next(_names)}", list(prompt), params or greedy(), **more)  # type: ignore[arg-type]


def drive(llm: LLM, each: Callable[[int], None] | None = None) -> None:
    """Step until nothing is to be done; `each` is called before every step with its number."""
    step = 0
    while llm.engine.busy:
        if each:
            each(step)
        llm.engine.step()
        step += 1
        assert step < 5000, "the engine makes no progress."


def smallest_gap(outputs: Sequence[RequestOutput]) -> float:
    """Least distance between the two best tokens of any step; needs logprobs of 2 or more."""
    gaps = []
    for sample in (sample for output in outputs for sample in output.outputs):
        assert sample.logprobs is not None
        for values in sample.logprobs:
            best = sorted((v.logprob for v in values.values()), reverse=True)
            gaps.append(best[0] - best[1])
    return min(gaps)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def teacher_forced(llm: LLM, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """Log-probability that the model of `llm` gives each output token after those before it."""
    ids = [*prompt, *output]
    rows = log_softmax(llm.logits(ids)[len(prompt) - 1 : len(ids) - 1])
    return rows[np.arange(len(output)), list(output)]


def stored_slots(llm: LLM, request: Request) -> list[tuple[int, int, int, int]]:
    """(position, rank, page, offset) of every token that a dispatched step has stored of a running request."""
    pool, found = llm.engine.pool, []
    for rank in pool.holders(request.name):
        lag, pages = pool.layout.lag(pool.home(request.name), rank), pool.pages(request.name, rank)
        local = np.arange(pool.kv.tokens_held(pool.layout, lag, request.computed))
        for i, position in enumerate(pool.kv.positions(pool.layout, lag, local).tolist()):
            found.append((position, rank, pages[i // pool.kv.page_size], i % pool.kv.page_size))
    return found


def poison_unstored(llm: LLM) -> None:
    """NaN in every slot of every pool, of free pages and of held ones, whose token no step has stored."""
    state = llm.engine.state
    keep = np.zeros(state.pools[0].shape[:3], bool)
    for request in llm.engine.scheduler.running:
        for _, *slot in stored_slots(llm, request):
            keep[tuple(slot)] = True
    for i, array in enumerate(state.pools):
        values = np.where(keep[..., None], np.asarray(array), np.float32(np.nan))
        state.pools[i] = jax.device_put(values, array.sharding)


class Ballast:
    """Takes pages out of a pool, so that a large one behaves like a small one. Release it before the engine is idle."""

    def __init__(self, llm: LLM) -> None:
        self.engine, self.names = llm.engine, []

    def fill(self, leave: int) -> None:
        """Leave at most `leave` free pages on every rank, a page at a time."""
        pool = self.engine.pool
        for rank in range(pool.layout.size):
            while pool.free_pages()[rank] > leave:
                self.names.append(f"ballast{next(_names)}")
                pool.add(self.names[-1], rank)
                pool.grow(self.names[-1], 1)

    def release(self) -> None:
        for name in self.names:
            self.engine.pool.release(name)
        self.names = []


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small fixture of the scenarios, as a checkpoint."""
    return write_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def layouts(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The layouts that this run's tests ask shared engines for: all of them where slow tests run."""
    return LAYOUTS if any(item.get_closest_marker("slow") for item in request.session.items) else USUAL


@pytest.fixture(scope="session")
def shared(small: Path, layouts: tuple[str, ...]) -> LLM:
    """One engine of 4 ranks for most tests. All is compiled before the first, so nothing that they do may compile."""
    return make_llm(small, layouts=layouts, compile_ahead=True)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory, layouts: tuple[str, ...]) -> LLM:
    """Dense layers, queries without a low rank, positions dealt out one by one."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("plain"), q_lora_rank=None, first_k_dense_replace=3)
    return make_llm(checkpoint, layouts=layouts, cp_interleave=1, compile_ahead=True)


@pytest.fixture(scope="session")
def alone(small: Path) -> LLM:
    """The same model on a single device."""
    return make_llm(small, num_devices=1, layouts=("tp",))


@pytest.fixture(scope="session")
def spreading(small: Path) -> LLM:
    """Programs are compiled as they are asked for: few tests need them all."""
    return make_llm(
        small, layouts=("tp", "dp", "cp"), switch_modes=("splash", "spread"), spread_layers=1, spread_parts=3
    )


def _clean(llm: LLM) -> Iterator[LLM]:
    """Lend an engine; afterwards it must be empty, and is made so for the next test."""
    yield llm
    engine = llm.engine
    left = [*engine.scheduler.running, *engine.scheduler.waiting]
    for name in [name for name in engine.pool.manifest().requests if name.startswith("ballast")]:
        engine.pool.release(name)
    for request in left:
        engine.abort(request.name)
    while engine.busy:
        engine.step()
    assert not left, f"a test left {len(left)} requests behind."
    assert_all_free(llm)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield from _clean(shared)


@pytest.fixture
def plain_llm(plain: LLM) -> Iterator[LLM]:
    yield from _clean(plain)
