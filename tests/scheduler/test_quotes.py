"""Snapshots of a scheduler and its pool: the steps that each layout could run, and what it is quoted for them."""

from collections.abc import Mapping

import pytest

from splash_jax.cost import Load, Room
from splash_jax.errors import PolicyError
from splash_jax.kv import PagePool
from splash_jax.layouts import make_layout
from splash_jax.ownership import Bucket, KVShape, Layout
from splash_jax.scheduler import (
    Memory,
    Observer,
    PolicyConfig,
    Request,
    SamplingParams,
    Scheduler,
    Snapshot,
    SwitchCost,
    chunk_sizes,
    decide,
)

LAYOUTS = tuple(make_layout(role, {"rank": 4}) for role in ("tp", "dp"))
KV = KVShape(page_size=4, interleave=4, bytes_per_token=1)


class PerRow:
    """A millisecond for every row, twice as many in the second layout; a switch takes as long as a step."""

    def step_seconds(self, load: Load) -> Mapping[Layout, float]:
        return {one: 1e-3 * (i + 1) * int(load.new_rows.sum()) for i, one in enumerate(LAYOUTS)}

    def switch_seconds(self, src: Layout, load: Load) -> Mapping[Layout, SwitchCost]:
        return {one: SwitchCost(self.step_seconds(load)[src]) for one in LAYOUTS if one != src}


class Place:
    """Requests that run or wait in the first layout, with chunks of 16 to 128 rows to choose among."""

    def __init__(self) -> None:
        self.pool = PagePool(LAYOUTS[0], KV, 1000)
        self.scheduler = Scheduler(
            8, lambda _: (Bucket(decode=8, tiles=0, tile=16), Bucket(decode=8, tiles=8, tile=16))
        )
        self.observer = Observer(
            costs=PerRow(), room=Room(KV, dict.fromkeys(LAYOUTS, 1000)), slots=8, chunks=chunk_sizes(128, 16)
        )

    def add(self, name: str, prompt: int, computed: int | None = None) -> None:
        request = Request(name=name, prompt_ids=[0] * prompt, params=SamplingParams(), seed=0, max_total=prompt + 50)
        if computed is None:
            self.scheduler.add(request)
            return
        request.computed = computed
        self.pool.add(name, 0)
        self.pool.grow(name, prompt)
        self.scheduler.running.append(request)

    def snapshot(self, step_seconds: float | None = None) -> Snapshot:
        return self.observer.snapshot(
            self.scheduler, self.pool, step=0, time=0.0, policy=PolicyConfig(step_seconds=step_seconds), memory=Memory()
        )


def test_chunks_are_whole_tiles_and_halves_of_what_a_step_holds():
    assert chunk_sizes(128, 16) == (16, 32, 64, 128)
    assert chunk_sizes(8192, 64) == (512, 1024, 2048, 4096, 8192)
    assert chunk_sizes(48, 16) == (16, 32, 48)
    assert chunk_sizes(16, 16) == (16,)


@pytest.mark.parametrize(("limit", "chunk"), [(None, 128), (1.0, 128), (0.07, 64), (0.02, 16), (0.001, 16)])
@pytest.mark.parametrize("admitted", [False, True])
def test_the_longest_step_of_a_policy_bounds_its_prompt_rows(limit, chunk, admitted):
    """Also in the step that admits the prompt: the estimate then is of a step with its first chunk."""
    place = Place()
    place.add("draws", 10, 10)
    place.add("long", 500, None if admitted else 100)
    decision = decide(place.snapshot(limit))
    assert decision.action.chunk == chunk


def test_without_prompts_there_is_no_chunk_and_nothing_to_choose():
    place = Place()
    place.add("draws", 10, 10)
    for limit in (None, 0.1):
        snapshot = place.snapshot(limit)
        assert decide(snapshot).action.chunk == 0
        assert all(len(quote.choices) == 1 for quote in snapshot.quotes)


def test_a_switch_before_anything_runs_is_not_free():
    place = Place()
    place.add("waits", 40)
    tp, dp = place.snapshot().quotes
    assert dp.there == pytest.approx(0.04) and dp.back == pytest.approx(0.08)
    assert not dp.refused and not tp.refused


@pytest.mark.parametrize("steered", [{"pin": "cp"}, {"allowed": ("tp", "cp")}])
def test_a_policy_of_layouts_that_are_not_there_is_refused(steered):
    place = Place()
    place.add("waits", 40)
    with pytest.raises(PolicyError, match="the policy's 'cp' is none of the layouts that programs exist for: tp, dp"):
        place.observer.snapshot(
            place.scheduler, place.pool, step=0, time=0.0, policy=PolicyConfig(**steered), memory=Memory()
        )
