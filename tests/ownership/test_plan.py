"""Laws of switch plans over every pair of layouts: they arrive, move only what lacks, and cost what Eq. 2 and 3 say."""

import copy
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash_jax.errors import PoolCorrupt, SwitchRefused
from splash_jax.layouts import ROLES, make_layout
from splash_jax.ownership import KVShape, Layout, Manifest, RequestPages, StateBytes, SwitchPlan, apply, plan_switch
from splash_jax.ownership.manifest import owner_pages_needed
from splash_jax.ownership.plan import weight_move
from splash_jax.ownership.travel import travel_axes
from tests.support import DIRECTIONS, MESHES

PAGE, WIDTH = 4, 10
STATE = StateBytes(projections=8 * 105 * 4, common=0, kv_per_token=WIDTH, num_layers=3)
GARBAGE = -1
SPLIT = ("tp", "dop", "dcp")
HISTORY = {"tp": "all", "rep": "all", "dp": "request", "dop": "request", "cp": "position", "dcp": "position"}


def one(role: str, size: int) -> Layout:
    return make_layout(role, {"rank": size})


def scatter(layout: Layout, kv: KVShape, requests: dict[str, tuple[int, int]], spare: int, seed: int) -> Manifest:
    """Requests (home, tokens) on pages in random order, `spare` pages more than the fullest rank needs."""
    rng = np.random.default_rng(seed)
    pages = max(owner_pages_needed(kv, layout, requests), default=0) + spare
    free = [rng.permutation(pages).tolist() for _ in range(layout.size)]
    placed = {}
    for name, (home, tokens) in requests.items():
        held = {r: kv.pages_held(layout, layout.lag(home, r), tokens) for r in layout.holders(home)}
        taken = {r: tuple(free[r].pop() for _ in range(n)) for r, n in held.items()}
        placed[name] = RequestPages(home=home, num_tokens=tokens, pages=taken)
    return Manifest(layout=layout, kv=kv, pages_per_rank=pages, requests=placed)


def slots_of(manifest: Manifest) -> dict[tuple[int, int], int]:
    """(rank, token slot) -> what lies there by the manifest, as request number * 1000 + position."""
    kv, layout, found = manifest.kv, manifest.layout, {}
    for number, (_, request) in enumerate(sorted(manifest.requests.items())):
        for rank, pages in request.pages.items():
            lag = layout.lag(request.home, rank)
            local = np.arange(kv.tokens_held(layout, lag, request.num_tokens))
            for index, position in zip(local.tolist(), kv.positions(layout, lag, local).tolist(), strict=True):
                slot = rank, pages[index // kv.page_size] * kv.page_size + index % kv.page_size
                assert slot not in found, "two tokens share a slot"
                found[slot] = number * 1000 + position
    return found


def fill(manifest: Manifest, grain: int) -> list[np.ndarray]:
    """Arrays that hold what the manifest says, and garbage elsewhere: [grains, grain] per rank."""
    arrays = [np.full(manifest.pages_per_rank * manifest.kv.page_size, GARBAGE) for _ in range(manifest.layout.size)]
    for (rank, slot), content in slots_of(manifest).items():
        arrays[rank][slot] = content
    return [array.reshape(-1, grain) for array in arrays]


def assert_holds(manifest: Manifest, arrays: list[np.ndarray]) -> None:
    for (rank, slot), content in slots_of(manifest).items():
        assert arrays[rank].reshape(-1)[slot] == content, (rank, slot)


def check_plan(plan: SwitchPlan, moved_home: bool = False) -> None:
    """What must be true of a plan besides arriving."""
    src, dst = plan.before.layout, plan.after.layout
    still = [name for name in src.axis_names if name not in travel_axes(src, dst)]
    if not moved_home:
        assert all(src.index(a, still) == src.index(b, still) for a, b in plan.kv.sent), "sent along other axes"
    before, after = plan.before, plan.after
    have = {rank: {c for (r, _), c in slots_of(before).items() if r == rank} for rank in range(before.layout.size)}
    arrays = fill(before, plan.kv.grain)
    written: set[tuple[int, int]] = set()
    for (source, destination), pairs in plan.kv.sent.items():
        assert source != destination and len(pairs)
        for grain, slot in pairs.tolist():
            content = set(arrays[source][grain].tolist()) - {GARBAGE}
            assert content and not content & have[destination], "what is sent must be real, and must lack there"
            written.add((destination, slot))
    for rank, pairs in enumerate(plan.kv.local):
        assert all(old != new for old, new in pairs.tolist())
        written |= {(rank, slot) for slot in pairs[:, 1].tolist()}
    assert len(written) == sum(map(len, plan.kv.local)) + sum(map(len, plan.kv.sent.values())), "a slot written twice"
    for rank in range(after.layout.size):
        pages = [page for request in after.requests.values() for page in request.pages.get(rank, ())]
        assert len(pages) == len(set(pages)), "two requests share a page"
        assert all(0 <= page < after.pages_per_rank for page in pages)
    if not plan.kv.sent:
        assert plan.kv.primitive == "discard"
    elif plan.kv.primitive == "all_gather" and not moved_home:  # then one buffer per sender serves all its receivers
        groups: dict[int, dict[int, set[int]]] = {}
        for (source, destination), pairs in plan.kv.sent.items():
            groups.setdefault(source, {})[destination] = set(pairs[:, 0].tolist())
        size = math.prod(axis.size for axis in src.axes if axis.name not in still)
        for receivers in groups.values():
            assert len(receivers) == size - 1 and len({frozenset(grains) for grains in receivers.values()}) == 1
    json.dumps(plan.summary())


@st.composite
def situations(draw):
    size = draw(st.integers(1, 8))
    src, dst = draw(st.sampled_from(DIRECTIONS))
    kv = KVShape(page_size=PAGE, interleave=draw(st.sampled_from([1, 2, PAGE])), bytes_per_token=WIDTH)
    lengths = st.one_of(st.sampled_from([0, 1, PAGE - 1, PAGE, PAGE + 1, PAGE * size]), st.integers(0, 40))
    homes = st.integers(0, size - 1)
    requests = draw(st.dictionaries(st.sampled_from("abcdef"), st.tuples(homes, lengths)))
    moved = draw(st.dictionaries(st.sampled_from(sorted(requests)), homes)) if requests and draw(st.booleans()) else {}
    now = scatter(one(src, size), kv, requests, draw(st.integers(0, 6)), draw(st.integers(0, 99)))
    placed = {name: (moved.get(name, home), tokens) for name, (home, tokens) in requests.items()}
    room = max(owner_pages_needed(kv, one(dst, size), placed), default=0) + draw(st.integers(0, 6))
    return now, one(dst, size), moved, room


@given(situations())
def test_a_plan_reaches_its_target_and_back(situation):
    now, dst, homes, room = situation
    plan = plan_switch(now, dst, pages_per_rank=room, state=STATE, homes=homes)
    check_plan(plan, bool(homes))
    assert (plan.before, plan.after.layout, plan.after.pages_per_rank) == (now, dst, room)
    for name, request in now.requests.items():
        there = plan.after.requests[name]
        assert (there.home, there.num_tokens) == (homes.get(name, request.home), request.num_tokens)
        assert tuple(there.pages) == dst.holders(there.home)
    arrived = apply(plan, fill(now, plan.kv.grain))
    assert_holds(plan.after, arrived)

    old = {name: request.home for name, request in now.requests.items()}
    back = plan_switch(plan.after, now.layout, pages_per_rank=now.pages_per_rank, state=STATE, homes=old)
    check_plan(back, bool(homes))
    returned = apply(back, arrived)
    assert_holds(back.after, returned)
    assert {n: (r.home, r.num_tokens) for n, r in back.after.requests.items()} == {
        n: (r.home, r.num_tokens) for n, r in now.requests.items()
    }


@given(situations(), st.sampled_from(sorted(ROLES)))
def test_a_walk_through_three_layouts_keeps_everything(situation, third):
    now, dst, homes, room = situation
    plan = plan_switch(now, dst, pages_per_rank=room, state=STATE, homes=homes)
    arrays = apply(plan, fill(now, plan.kv.grain))
    last = one(third, dst.size)
    placed = {name: (r.home, r.num_tokens) for name, r in plan.after.requests.items()}
    onward = plan_switch(plan.after, last, pages_per_rank=max(owner_pages_needed(now.kv, last, placed)), state=STATE)
    assert_holds(onward.after, apply(onward, [a.reshape(-1, onward.kv.grain) for a in arrays]))


SIZES = [pytest.param(name, marks=pytest.mark.slow) if name == "2x4" else name for name in MESHES]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("roles", list(itertools.product(ROLES, repeat=2)), ids="-".join)
def test_hybrids_on_two_axes_reach_every_layout_of_two_axes(roles, size):
    mesh = MESHES[size]
    kv = KVShape(page_size=PAGE, interleave=2, bytes_per_token=WIDTH)
    requests = {"a": (0, 13), "b": (3, 1), "c": (1, 24), "d": (2, 0), "e": (2, 7)}
    src = make_layout(dict(zip(mesh, roles, strict=True)), mesh)
    now = scatter(src, kv, requests, 2, 0)
    for others in itertools.product(ROLES, repeat=2):
        dst = make_layout(dict(zip(mesh, others, strict=True)), mesh)
        plan = plan_switch(now, dst, pages_per_rank=max(owner_pages_needed(kv, dst, requests)) + 1, state=STATE)
        check_plan(plan)
        assert_holds(plan.after, apply(plan, fill(now, plan.kv.grain)))
        before, after = (set(layout.head_axes) for layout in (src, dst))
        parts = lambda axes: math.prod(mesh[axis] for axis in axes)  # noqa: E731
        kept = STATE.projections // parts(before | after)  # Eq. 3: a rank keeps the heads that both layouts give it
        assert plan.weights.bytes_per_rank == STATE.projections // parts(after) - kept


@pytest.mark.parametrize("T", [2, 4, 8])
@pytest.mark.parametrize(("src", "dst"), DIRECTIONS)
@pytest.mark.parametrize("interleave", [1, PAGE])
def test_balanced_requests_cost_what_eq_2_and_3_say(src, dst, T, interleave):
    """Owners i mod T, positions in equal shares: the primitives and bytes of the paper, on every rank alike."""
    kv = KVShape(page_size=PAGE, interleave=interleave, bytes_per_token=WIDTH)
    tokens, count = PAGE * T, 2 * T
    now = scatter(one(src, T), kv, {f"r{i}": (i % T, tokens) for i in range(count)}, 0, 1)
    plan = plan_switch(now, one(dst, T), pages_per_rank=count * T, state=STATE)
    Bsk, W = count * tokens * WIDTH, STATE.projections
    before, after = (HISTORY[role] for role in (src, dst))
    if before == "all" or before == after:
        primitive, received = "discard", 0
    elif after == "all":
        primitive, received = "all_gather", Bsk * (T - 1) // T
    else:
        primitive, received = "all_to_all", Bsk * (T - 1) // T // T
    assert plan.kv.primitive == primitive
    assert plan.kv.bytes_received(T) == [received] * T
    gathers = src in SPLIT and dst not in SPLIT
    assert plan.weights.bytes_per_rank == (W * (T - 1) // T if gathers else 0)
    expected = "all_gather" if gathers else "discard" if src not in SPLIT and dst in SPLIT else "keep"
    assert plan.weights.primitive == expected
    assert plan.bytes_per_rank() == [3 * (received + plan.weights.bytes_per_rank)] * T


def test_the_sending_is_spread():
    """From tp nothing is sent; between cp and dp every rank sends as much as it receives."""
    kv = KVShape(page_size=PAGE, interleave=PAGE, bytes_per_token=WIDTH)
    now = scatter(one("cp", 4), kv, {f"r{i}": (i, 16 * PAGE) for i in range(4)}, 0, 0)
    plan = plan_switch(now, one("dp", 4), pages_per_rank=16, state=STATE)
    assert {pair: len(grains) for pair, grains in plan.kv.sent.items()} == dict.fromkeys(
        itertools.permutations(range(4), 2), 4
    )
    assert plan.kv.busiest_pair == 4


def test_a_request_with_fewer_pages_than_tokens_is_found():
    """Or else another request's page would be read as its history."""
    kv = KVShape(page_size=PAGE, interleave=PAGE, bytes_per_token=WIDTH)
    now = scatter(one("dp", 2), kv, {"a": (0, 2 * PAGE), "b": (0, 2 * PAGE)}, spare=2, seed=0)
    short = replace(now.requests["a"], pages={0: now.requests["a"].pages[0][:1]})
    now = replace(now, requests={**now.requests, "a": short})
    with pytest.raises(PoolCorrupt, match="rank 0 has fewer pages of request 'a' than its tokens fill"):
        plan_switch(now, one("tp", 2), pages_per_rank=9, state=STATE)


def test_pages_that_already_hold_the_right_thing_stay():
    """Discards move nothing, not even locally, while pages are as many: only block tables change."""
    kv = KVShape(page_size=PAGE, interleave=PAGE, bytes_per_token=WIDTH)
    requests = {f"r{i}": (i % 4, 3 + 5 * i) for i in range(7)}
    for src, dst in (("tp", "dp"), ("tp", "cp"), ("tp", "dop"), ("dp", "dop"), ("dop", "dp")):
        now = scatter(one(src, 4), kv, requests, 3, 5)
        plan = plan_switch(now, one(dst, 4), pages_per_rank=now.pages_per_rank, state=STATE)
        assert not plan.kv.sent and not any(map(len, plan.kv.local))


def test_a_switch_that_does_not_fit_is_refused_and_changes_nothing():
    kv = KVShape(page_size=PAGE, interleave=PAGE, bytes_per_token=WIDTH)
    now = scatter(one("cp", 4), kv, {"a": (1, 17), "b": (1, 8), "c": (2, 4)}, 0, 0)
    frozen = copy.deepcopy(now)
    words = rf"cp -> dp does not fit: rank 1 needs 7 pages and has 5, it lacks {2 * PAGE * WIDTH * 3} bytes"
    with pytest.raises(SwitchRefused, match=words):
        plan_switch(now, one("dp", 4), pages_per_rank=5, state=STATE)
    with pytest.raises(SwitchRefused, match="rank 3 needs 7 pages and has 6, it lacks 120 bytes"):
        plan_switch(now, one("dop", 4), pages_per_rank=6, state=STATE, homes={"a": 3, "b": 3})
    assert now == frozen
    assert plan_switch(now, one("dp", 4), pages_per_rank=7, state=STATE).after.pages_used() == [0, 7, 1, 0]


@pytest.mark.parametrize(("src", "dst"), DIRECTIONS)
def test_nothing_to_move(src, dst):
    kv = KVShape(page_size=PAGE, interleave=1, bytes_per_token=WIDTH)
    for requests in ({}, {"a": (0, 0)}):
        plan = plan_switch(scatter(one(src, 4), kv, requests, 3, 0), one(dst, 4), pages_per_rank=3, state=STATE)
        assert plan.kv.primitive == "discard" and not plan.kv.sent
        assert plan.kv.bytes_received(4) == [0] * 4


def test_weights_of_hybrids():
    """Only the axes that stop splitting heads are gathered, and only what lacks is received."""
    mesh = {"node": 2, "chip": 4}
    layout = lambda text: make_layout(text, mesh)  # noqa: E731
    W = STATE.projections
    for src, dst, received in [
        ("node=dop,chip=cp", "node=dop,chip=dop", 0),
        ("node=dop,chip=dop", "node=dop,chip=cp", W // 2 - W // 8),
        ("node=tp,chip=tp", "node=dp,chip=tp", W // 4 - W // 8),
        ("node=tp,chip=tp", "node=dp,chip=dp", W - W // 8),
        ("node=tp,chip=dp", "node=dp,chip=tp", W // 4 - W // 8),
    ]:
        assert weight_move(layout(src), layout(dst), STATE).bytes_per_rank == received, (src, dst)
