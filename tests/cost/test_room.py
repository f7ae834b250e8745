"""Pages of real batches against the pool that would hold them, and Eq. 5 and 6 by hand."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from splash_jax.cost import Load, Room, capacity, switch_lacks
from splash_jax.layouts import ROLES, make_layout
from splash_jax.ownership import KVShape, StateBytes, footprint
from splash_jax.ownership.manifest import owner_pages_needed

STATE = StateBytes(projections=8 * 840, common=1000, kv_per_token=10, num_layers=3)
EVERY = {
    "one axis": [make_layout(role, {"rank": 8}) for role in ROLES],
    "two": [make_layout(f"node={a},chip={b}", {"node": 2, "chip": 4}) for a, b in product(ROLES, repeat=2)],
}


@given(
    st.sampled_from(sorted(EVERY)),
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 7)), min_size=1, max_size=30),
    st.sampled_from([(16, 16), (16, 4), (64, 64), (1, 1)]),
)
def test_pages_needed_are_those_that_a_manifest_counts(mesh, requests, cut):
    kv = KVShape(page_size=cut[0], interleave=cut[1], bytes_per_token=10)
    context, home = map(np.array, zip(*requests, strict=True))
    load = Load(context, np.ones_like(context), home)
    room = Room(kv, dict.fromkeys(EVERY[mesh], 100))
    placed = {str(i): (h, t) for i, (t, h) in enumerate(requests)}
    lacks = room.lacks(load)
    for layout, need in room.needed(load).items():
        expected = owner_pages_needed(kv, layout, placed)
        assert need.tolist() == expected, layout
        assert lacks[layout] == max(0, max(expected) - 100)


def test_a_layout_that_splits_and_owns_admits_what_others_must_queue():
    """At one budget: the point of dop, on a batch (Eq. 6)."""
    budget = 4 * STATE.projections * STATE.num_layers
    kv = KVShape(page_size=4, interleave=4, bytes_per_token=10)
    held = {one: capacity(STATE, one, page_size=4, budget=budget) for one in EVERY["one axis"]}
    by_name = {str(one): found for one, found in held.items()}
    longest = {str(one): found.longest(16, one) for one, found in held.items()}
    assert by_name["dop"].tokens == 8 * by_name["tp"].tokens > by_name["cp"].tokens == by_name["dp"].tokens
    assert longest["dop"] > longest["dp"] > longest["tp"]
    assert (
        held[EVERY["one axis"][3]].longest(9, EVERY["one axis"][3]) == by_name["dop"].tokens // 8 // 2
    )  # uneven owners
    room = Room(kv, {one: found.pages for one, found in held.items()})
    load = Load.balanced(16, longest["dop"] // 4 * 4, 8)
    lacks = {str(one): lack for one, lack in room.lacks(load).items()}
    assert lacks["dop"] == 0 < lacks["dp"] < lacks["tp"]


def test_a_switch_needs_the_larger_state_and_a_layer_in_transit():
    """Eq. 5: exactly the bytes that it lacks, and none once they are there."""
    tp, dp = EVERY["one axis"][0], EVERY["one axis"][1]
    pages = {tp: 50, dp: 20}
    a, b = (footprint(STATE, one, pages=pages[one], page_size=4) for one in (tp, dp))
    need = max(x.common + x.projections + x.kv for x in (a, b)) + max(a.transit, b.transit) + 7
    lack = lambda budget: switch_lacks(STATE, tp, dp, pages=pages, page_size=4, budget=budget, reserve=7)  # noqa: E731
    assert (lack(need), lack(need - 5), lack(10 * need)) == (0, 5, 0)


def test_pools_that_fit_a_budget_can_be_switched():
    """Pages are counted with a layer in transit, so switches between such pools lack at most another layer's room."""
    budget = 6 * STATE.projections * STATE.num_layers
    pages = {one: capacity(STATE, one, page_size=4, budget=budget).pages for one in EVERY["one axis"]}
    for src, dst in product(pages, repeat=2):
        lack = switch_lacks(STATE, src, dst, pages=pages, page_size=4, budget=budget)
        transits = [footprint(STATE, one, pages=pages[one], page_size=4).transit for one in (src, dst)]
        assert lack <= max(transits) - min(transits)
