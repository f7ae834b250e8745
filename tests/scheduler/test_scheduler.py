"""Batching as plain data: admission, chunks, homes, preemption and slots, with a loop that stands in for the engine."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash_jax.kv import PagePool
from splash_jax.layouts import ROLES, make_layout
from splash_jax.ownership import Bucket, KVShape, Layout
from splash_jax.scheduler import Request, Rows, SamplingParams, Schedule, Scheduler, Status

PAGE, TILE = 4, 4
KV = KVShape(page_size=PAGE, interleave=PAGE, bytes_per_token=1)


def make_request(name: str, prompt: int, new: int = 4, score: bool = False) -> Request:
    total = prompt if score else prompt + new
    return Request(
        name=name, prompt_ids=list(range(prompt)), params=SamplingParams(), seed=0, max_total=total, score=score
    )


@dataclass
class Loop:
    """The engine without devices: a step is dispatched before the tokens of the step before it are read."""

    role: str = "dp"
    ranks: int = 4
    pages: int = 100
    slots: int = 8
    tiles: int = 2
    pool: PagePool = field(init=False)
    scheduler: Scheduler = field(init=False)
    pending: Schedule | None = None
    steps: list[Schedule] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = PagePool(make_layout(self.role, {"rank": self.ranks}), KV, self.pages)
        self.scheduler = Scheduler(self.slots, self.buckets)

    def buckets(self, layout: Layout) -> tuple[Bucket, ...]:
        decode = math.ceil(self.slots / layout.owner_groups)
        small = [Bucket(decode=n, tiles=0, tile=TILE) for n in sorted({1, decode})]
        return (*small, Bucket(decode=decode, tiles=self.tiles, tile=TILE))

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def step(self) -> Schedule:
        if self.pending and self.scheduler.under_pressure(self.pool):
            self.read()
        schedule = self.scheduler.schedule(self.pool)
        self.check(schedule)
        before, self.pending = self.pending, schedule if schedule.chunks else None
        for chunk in schedule.chunks:
            chunk.request.computed += chunk.rows
            chunk.request.in_flight += chunk.draws
        self.read(before)
        self.steps.append(schedule)
        return schedule

    def read(self, schedule: Schedule | None = None) -> None:
        if schedule is None:
            schedule, self.pending = self.pending, None
        for chunk in schedule.chunks if schedule else ():
            request = chunk.request
            request.in_flight -= chunk.draws
            if request.status is Status.FINISHED:
                continue
            if chunk.draws:
                request.output_ids.append(1000 + len(request.output_ids))
            if request.known == request.max_total and (chunk.draws or chunk.start + chunk.rows == request.known):
                self.scheduler.finish(self.pool, request)

    def check(self, schedule: Schedule) -> None:
        """What holds of every step: it fits its bucket, starts where each request is, and draws last rows only."""
        layout, running = self.pool.layout, self.scheduler.running
        self.pool.check(live=[r.name for r in running])
        decode, tiles = [0] * layout.owner_groups, [0] * layout.owner_groups
        assert len({chunk.request.name for chunk in schedule.chunks}) == len(schedule.chunks)
        for chunk in schedule.chunks:
            request = chunk.request
            assert request.status is Status.RUNNING and chunk.rows > 0 and chunk.start == request.computed
            assert self.pool.num_tokens(request.name) >= chunk.start + chunk.rows
            assert chunk.draws is (chunk.start + chunk.rows == request.total and not request.score)
            group = layout.group_of(self.pool.home(request.name))
            if chunk.rows == 1 and decode[group] < schedule.bucket.decode:
                decode[group] += 1
            else:
                tiles[group] += math.ceil(chunk.rows / TILE)
        assert max(decode) <= schedule.bucket.decode and max(tiles) <= schedule.bucket.tiles
        assert len({r.slot for r in running}) == len(running) <= self.slots
        assert all(0 <= r.slot < self.slots for r in running)
        assert all(r.slot == -1 and r.computed == 0 for r in self.scheduler.waiting)

    def run(self, most: int = 500) -> list[Schedule]:
        """Until nothing is left. Every step does something, or there is no progress."""
        for _ in range(most):
            if not self.scheduler.unfinished and self.pending is None:
                self.pool.check(live=())
                assert self.pool.free_pages() == [self.pages] * self.ranks
                return self.steps
            had_pending = self.pending is not None
            assert self.step().chunks or had_pending, "a step neither ran nor read anything"
        raise AssertionError("no end")


def rows_of(schedule: Schedule) -> dict[str, tuple[int, int, bool]]:
    return {c.request.name: (c.start, c.rows, c.draws) for c in schedule.chunks}


@pytest.mark.parametrize(
    ("outputs", "in_flight", "computed", "score", "most", "rows"),
    [
        (0, 0, 2, False, 5, Rows.PROMPT),  # of a prompt of 3 the last row alone is missing
        (0, 1, 3, False, 5, Rows.DRAW),
        (1, 0, 3, False, 5, Rows.DRAW),
        (1, 0, 0, False, 5, Rows.PROMPT),  # preempted
        (1, 1, 4, False, 5, Rows.NONE),  # the fifth is being drawn
        (0, 0, 2, True, 3, Rows.PROMPT),
        (0, 0, 3, True, 3, Rows.NONE),
    ],
)
def test_what_rows_the_next_step_may_have(outputs, in_flight, computed, score, most, rows):
    request = Request(name="a", prompt_ids=[1, 2, 3], params=SamplingParams(), seed=0, score=score, max_total=most)
    request.output_ids, request.in_flight, request.computed = [7] * outputs, in_flight, computed
    assert request.rows is rows


@given(st.sampled_from(sorted(ROLES)), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(0, 6), st.data())
def test_everybody_gets_every_token(role, ranks, slots, spare, data):
    """Pools that hold little more than one request: preemption after preemption, and still all end, exactly once."""
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=7))
    layout = make_layout(role, {"rank": ranks})
    pages = max(KV.pages_held(layout, 0, prompt + new) for prompt, new in shapes) + spare
    loop = Loop(role, ranks, pages, slots)
    requests = [make_request(f"r{i}", prompt, new) for i, (prompt, new) in enumerate(shapes)]
    late = data.draw(st.integers(0, len(requests)))
    loop.add(*requests[late:])
    for request in requests[:late]:
        loop.step()
        loop.add(request)
    loop.run()
    for request, (_, new) in zip(requests, shapes, strict=True):
        assert request.status is Status.FINISHED and request.output_ids == [1000 + i for i in range(new)]


@pytest.mark.parametrize("prompt", [1, 3, 4, 7, 8, 9, 15, 16, 17, 33])
def test_prompts_are_cut_into_chunks_and_only_the_last_draws(prompt):
    """Two tiles of four rows: chunks of eight, contiguous, never empty; one drawn token ends it."""
    loop = Loop()
    loop.add(make_request("a", prompt, 1))
    chunks = [rows_of(s)["a"] for s in loop.run() if s.chunks]
    assert sum(rows for _, rows, _ in chunks) == prompt
    assert [rows for _, rows, _ in chunks[:-1]] == [8] * (len(chunks) - 1)
    assert [draws for *_, draws in chunks] == [False] * (len(chunks) - 1) + [True]


def test_prompts_share_the_budget_of_their_owner_oldest_first():
    loop = Loop("cp")
    loop.add(make_request("a", 5), make_request("b", 9), make_request("c", 2))
    assert rows_of(loop.step()) == {"a": (0, 5, True)}  # five rows take both tiles
    assert rows_of(loop.step()) == {"a": (5, 1, True), "b": (0, 8, False)}
    assert rows_of(loop.step()) == {"a": (6, 1, True), "b": (8, 1, True), "c": (0, 2, True)}


def test_owners_have_budgets_of_their_own():
    loop = Loop("dp")
    loop.add(*(make_request(name, 8) for name in "abcde"))
    assert set(rows_of(loop.step())) == set("abcd")  # one whole prompt on each of four ranks
    assert set(rows_of(loop.step())) == set("abcde")


def test_a_score_is_run_once_and_draws_nothing():
    loop = Loop()
    request = make_request("a", 11, score=True)
    loop.add(request)
    chunks = [rows_of(s)["a"] for s in loop.run() if s.chunks]
    assert chunks == [(0, 8, False), (8, 3, False)] and request.output_ids == []


def test_the_smallest_bucket_that_fits():
    loop = Loop("cp", slots=8)
    loop.add(make_request("a", 1), make_request("b", 3))
    assert loop.step().bucket == Bucket(decode=8, tiles=2, tile=TILE)
    assert loop.step().bucket == Bucket(decode=8, tiles=0, tile=TILE)


def test_a_switch_takes_one_of_two_buckets():
    """Its programs are compiled for these: all single rows, and the largest."""
    loop = Loop("cp", slots=8)
    loop.add(make_request("a", 3))
    schedule = lambda: loop.scheduler.schedule(loop.pool, switching=True)  # noqa: E731
    assert schedule().bucket == Bucket(decode=8, tiles=2, tile=TILE)
    loop.scheduler.running[0].computed = 3
    assert schedule().bucket == Bucket(decode=8, tiles=0, tile=TILE)
    assert loop.scheduler.schedule(loop.pool).bucket == Bucket(decode=1, tiles=0, tile=TILE)


def homes(loop: Loop) -> dict[str, int]:
    return {r.name: loop.pool.home(r.name) for r in loop.scheduler.running}


def test_homes_balance_the_history_that_is_to_come():
    """The long answer keeps its rank to itself while short ones share, up to an even number of requests each."""
    loop = Loop("dp", ranks=2, slots=4, tiles=8)
    loop.add(make_request("long", 4, 60), *(make_request(f"s{i}", 4, 4) for i in range(3)))
    loop.step()
    assert homes(loop) == {"long": 0, "s0": 1, "s1": 1, "s2": 0}


def test_a_rank_with_its_share_of_requests_takes_no_more():
    loop = Loop("dp", ranks=4, slots=8, tiles=8)
    loop.add(*(make_request(f"r{i}", 2, 2 + 50 * (i % 4 == 0)) for i in range(8)))
    loop.step()
    assert sorted(homes(loop).values()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_admission_leaves_a_page_for_everyone_who_runs():
    loop = Loop("tp", pages=5, tiles=8)
    loop.add(make_request("a", 8), make_request("b", 8), make_request("c", 4))
    assert set(rows_of(loop.step())) == {"a", "b"}
    loop = Loop("tp", pages=4, tiles=8)
    loop.add(make_request("a", 8, 1), make_request("b", 8))
    assert set(rows_of(loop.step())) == {"a"}  # two pages are free, and "a" may want one of them
    assert [r.name for r in loop.scheduler.waiting] == ["b"] and "b" not in loop.pool


def test_the_youngest_gives_way_and_returns_to_the_head():
    loop = Loop("tp", pages=6, slots=4, tiles=8)
    a, b, c, d = (make_request(name, prompt, 12) for name, prompt in (("a", 7), ("b", 4), ("c", 3), ("d", 4)))
    loop.add(a, b, c, d)
    while not (preempted := loop.step().preempted):
        assert d.status is Status.WAITING
    assert [r.name for r in preempted] == ["c"]
    assert (c.status, c.computed, c.slot, c.preemptions) == (Status.WAITING, 0, -1, 1)
    assert [r.name for r in loop.scheduler.waiting] == ["c", "d"]
    kept = list(c.output_ids)
    loop.run()
    assert c.output_ids[: len(kept)] == kept and len(c.output_ids) == 12
    assert a.preemptions == 0  # the oldest never gives way


def test_a_preempted_request_is_computed_again_from_all_it_knows():
    loop = Loop("tp", pages=4, slots=2, tiles=8)
    a, b = make_request("a", 7, 9), make_request("b", 3, 9)
    loop.add(a, b)
    loop.run()
    restarts = [rows_of(s)["b"] for s in loop.steps if rows_of(s).get("b", (1,))[0] == 0]
    assert len(restarts) == 1 + b.preemptions > 1
    assert restarts[0] == (0, 3, True)
    for start, rows, draws in restarts[1:]:
        assert start == 0 and rows > 3 and draws  # prompt and answer so far, and the next token is drawn at once
    assert b.ids(0, 12) == [0, 1, 2, *(1000 + i for i in range(9))]
    assert b.ids(2, 4) == [2, 1000] and b.ids(4, 6) == [1001, 1002]


def test_only_owners_of_the_same_rank_give_way():
    """Rank 1 runs out of pages: its own youngest gives way, not the youngest of all, which is at home on rank 0."""
    loop = Loop("dp", ranks=2, pages=7, slots=4, tiles=8)
    loop.add(*(make_request(name, *sizes) for name, sizes in dict(a=(4, 12), b=(4, 11), c=(4, 12), d=(1, 11)).items()))
    loop.step()
    assert homes(loop) == {"a": 0, "b": 1, "c": 1, "d": 0}
    assert [r.name for s in loop.run() for r in s.preempted] == ["c"]


def test_slots_are_used_again():
    loop = Loop("tp", slots=2, tiles=8)
    first = [make_request(name, 2, 2) for name in "ab"]
    loop.add(*first, make_request("c", 2, 2))
    loop.step()
    taken = {r.slot for r in first}
    assert taken == {0, 1} and loop.scheduler.waiting[0].name == "c"
    loop.run()
    loop.add(*(make_request(name, 2, 2) for name in "de"))
    loop.step()
    assert {r.slot for r in loop.scheduler.running} == {0, 1}


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_a_request_can_be_taken_out_wherever_it_is(after):
    loop = Loop("tp", slots=1)
    a, b = make_request("a", 20, 9), make_request("b", 20, 9)
    loop.add(a, b)
    for _ in range(after):
        loop.step()
    for request in (b, a):
        loop.scheduler.finish(loop.pool, request)
        assert request.status is Status.FINISHED and request.name not in loop.pool
    loop.run()
    assert not loop.scheduler.unfinished


def test_a_waiting_prompt_goes_where_rows_are_free_before_it_goes_where_least_will_grow():
    """Else every rank but one may idle while the lightest one works off a long prompt."""
    loop = Loop(ranks=2)
    loop.add(make_request("long", 30), make_request("longer", 60, new=40))
    loop.step()
    assert [loop.pool.home(name) for name in ("long", "longer")] == [0, 1]
    while loop.scheduler.running[0].rows is Rows.PROMPT:
        loop.step()
    assert loop.scheduler.running[1].rows is Rows.PROMPT, "rank 1 still works off its prompt"
    loop.scheduler.running[0].max_total = 1000  # so that rank 1 is the lighter one
    loop.add(make_request("next", 8))
    loop.step()
    assert loop.pool.home("next") == 0


def test_what_was_begun_is_counted():
    loop = Loop()
    loop.add(make_request("a", 10, new=3), make_request("b", 5, new=2), make_request("scored", 7, score=True))
    loop.run()
    assert loop.scheduler.begun == (3, 22, 5)


def test_it_is_known_what_the_first_of_the_queue_waits_for():
    loop = Loop(role="tp", ranks=1, pages=10, slots=3, tiles=2)
    loop.add(make_request("a", 12, new=20))
    loop.step()
    assert loop.scheduler.waiting_for is None
    large, small = make_request("large", 36), make_request("small", 2)
    loop.add(large, small)
    loop.step()
    loop.step()
    assert [r.name for r in loop.scheduler.waiting] == ["large", "small"], "first come, first served."
    waiting = loop.scheduler.waiting_for
    assert waiting is not None and waiting.request is large
    free = loop.pool.free_pages()[0]
    assert str(waiting) == f"request large lacks {9 + 1 - free} pages on rank 0"
    assert loop.pool.shortfall("a", 20) == 0 and free >= 1, "the small one would fit."
    loop.scheduler.finish(loop.pool, large)
    loop.step()
    assert loop.scheduler.waiting_for is None and small.status is Status.RUNNING


def test_rows_and_slots_may_be_what_lacks():
    loop = Loop(role="tp", ranks=1, pages=100, slots=2, tiles=1)
    loop.add(*(make_request(name, 8) for name in "abc"))
    loop.step()
    assert str(loop.scheduler.waiting_for) == "request b lacks 1 prompt rows"
    while len(loop.scheduler.running) < 2:
        loop.step()
    loop.step()
    assert str(loop.scheduler.waiting_for) == "request c lacks 1 slots"
    while loop.scheduler.unfinished:
        loop.step()
    assert loop.scheduler.waiting_for is None


def test_a_preempted_request_waits_for_pages():
    loop = Loop(role="tp", ranks=1, pages=6, slots=2, tiles=4)
    loop.add(make_request("old", 8, new=12), make_request("young", 8, new=12))
    while not loop.steps or not loop.steps[-1].preempted:
        loop.step()
    assert str(loop.scheduler.waiting_for) == "request young gave its pages to old"


def test_a_step_that_is_withdrawn_leaves_queue_and_pool_as_they_agree():
    loop = Loop(role="tp", ranks=1, pages=100, slots=4, tiles=4)
    loop.add(make_request("a", 8))
    loop.step()
    loop.step()
    before, begun = loop.pool.manifest(), loop.scheduler.begun
    other = PagePool.adopt(before)  # as the pool of a switch that was taken
    loop.add(make_request("b", 4), make_request("c", 4))
    schedule = loop.scheduler.schedule(other)
    assert [chunk.request.name for chunk in schedule.chunks] == ["a", "b", "c"]
    loop.scheduler.withdraw([loop.pool], schedule)
    assert [r.name for r in loop.scheduler.running] == ["a"] and loop.pool.manifest() == before
    assert [(r.name, r.slot, r.status) for r in loop.scheduler.waiting] == [
        ("b", -1, Status.WAITING), ("c", -1, Status.WAITING)
    ]  # fmt: skip
    assert loop.scheduler.begun == begun
    again = loop.scheduler.schedule(loop.pool)
    assert [chunk.request.name for chunk in again.chunks] == ["a", "b", "c"]
    assert len({chunk.request.slot for chunk in again.chunks}) == 3
    loop.scheduler.withdraw([loop.pool], again)  # what they were given stays theirs
    assert [r.name for r in loop.scheduler.running] == ["a", "b", "c"]
    loop.pool.check(live="abc")
    assert loop.scheduler.begun == begun.plus(prompts=2, rows=8)
