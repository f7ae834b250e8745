"""Questions about nothing, each with an answer or refused: no switch, no request, no token, one device, one layout."""

from itertools import product

import numpy as np
import pytest

from splash_jax.cost import (
    Capacity,
    Load,
    Room,
    Spread,
    StepModel,
    SwitchModel,
    cheapest_spread,
    load_hardware,
    quote_switch,
    switch_lacks,
)
from splash_jax.cost.regimes import break_even, regime_map, switch_costs, wall_order
from splash_jax.cost.residency import Cohorts
from splash_jax.cost.switch import projection_state
from splash_jax.errors import ConfigError, RequestError
from splash_jax.kv import filled_pool
from splash_jax.layouts import ROLES, make_layout
from splash_jax.ownership import KVShape, plan_switch
from splash_jax.scheduler import ModelCosts

H200 = load_hardware("h200")
MESHES = [{"rank": 1}, {"rank": 8}, {"node": 1, "chip": 4}]
KV = KVShape(page_size=4, interleave=4, bytes_per_token=160)


def layouts_of(mesh: dict[str, int]) -> list:
    """Every role, on all axes."""
    return [make_layout(role, mesh) for role in ROLES]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_where_a_batch_is_already_nothing_moves(small, mesh):
    """Plans and quotes of every layout to itself: no byte, no second, no step."""
    layouts = layouts_of(mesh)
    for one, counts in product(layouts, ([], [1], [5, 0, 64])):
        plan = plan_switch(
            filled_pool(one, KV, 100, counts).manifest(), one, pages_per_rank=100, state=projection_state(small)
        )
        assert set(plan.bytes_per_rank()) == {0} and plan.before == plan.after
        assert plan.kv.primitive == "discard" and plan.weights.primitive == "keep" and not any(map(len, plan.kv.local))
        quote = quote_switch(small, one, one, Load.decode([count + 1 for count in counts], one.size), H200)
        assert (quote.weight_bytes, quote.kv_bytes, quote.transfer, quote.blocking, quote.exposed) == (0, 0, 0, 0, 0)
        assert quote.spread == Spread(steps=0, exposed_total=0, exposed_worst=0) and quote.cheapest == 0
        pages = {one: 10}
        budget = 10**6
        short = switch_lacks(projection_state(small), one, one, pages=pages, page_size=4, budget=budget)
        assert switch_lacks(projection_state(small), one, one, pages=pages, page_size=4, budget=budget + short) == 0


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_batch_of_nothing_has_prices(small, mesh):
    """Weights are read and moved all the same; no history is."""
    layouts = layouts_of(mesh)
    steps, none = StepModel(small, layouts, H200), Load.decode([], layouts[0].size)
    assert all(0 < estimate.seconds < np.inf for estimate in steps.seconds(none).values())
    assert (steps.layer_seconds(none) > 0).all()
    assert set(Room(KV, dict.fromkeys(layouts, 0)).lacks(none).values()) == {0}
    costs, switches = ModelCosts(steps), SwitchModel(steps)
    no_row = Load(np.array([7]), np.array([0]), np.array([0]))
    nothing = Load(np.array([0]), np.array([0]), np.array([0]))
    for src in layouts:
        assert all(quote.kv_bytes == 0 for quote in switches.quotes(src, none).values())
        for load in (none, no_row, nothing):
            found = costs.switch_seconds(src, load)
            assert set(found) == set(layouts) - {src}
            assert all(0 <= cost.cheapest < np.inf for cost in found.values())


def test_one_layout_has_nowhere_to_go(small):
    alone = make_layout("tp", {"rank": 8})
    switches = SwitchModel(StepModel(small, [alone], H200))
    assert switches.quotes(alone, Load.decode([5], 8)) == {}
    assert switch_costs(switches, 1, [5]) == {}
    with pytest.raises(ValueError, match="a switch from dp is not quoted among tp: name it, too"):
        switches.quotes(make_layout("dp", {"rank": 8}), Load.decode([5], 8))


def test_a_layer_without_compute_or_transfer_has_a_spread():
    assert cheapest_spread([0.0], [0.0]) == (1, Spread(steps=2, exposed_total=0.0, exposed_worst=0.0))
    assert cheapest_spread([1.0], [0.0]) == (1, Spread(steps=2, exposed_total=1.0, exposed_worst=1.0))


def test_maps_walls_and_loads_of_nothing(small):
    (tp, dp), held = (make_layout(role, {"rank": 8}) for role in ("tp", "dp")), Capacity(pages=10, tokens=40)
    steps, rooms = StepModel(small, [tp, dp], H200), {tp: held, dp: held}
    assert held.longest(0, tp) == held.longest(1, tp) == 40
    assert break_even(steps, rooms, tp, tp, 10).gain == 0
    for contexts, batches in (([0], [1]), ([1], [0]), ([], [1]), ([1], [-3])):
        with pytest.raises(ConfigError, match="a map needs contexts and batches, all of at least 1; got"):
            regime_map(steps, rooms, contexts, batches)
    for given in ({"batch": 0}, {"context": 0}, {"context": -1}):
        with pytest.raises(ConfigError, match=r"walls are of a context or a batch of at least 1; got (0|-1)"):
            wall_order(steps, tp, held, **given)
    for batch, ranks in ((-1, 8), (1, 0)):
        with pytest.raises(RequestError, match=f"over 1 rank or more, not of {batch} over {ranks}"):
            Load.balanced(batch, 5, ranks)
    with pytest.raises(RequestError, match="not of 2 over 0"):
        Load.decode([1, 2], 0)
    with pytest.raises(ConfigError, match="cohorts are drawn of 1 request or more, 1 or more of them; got 0 and 5"):
        Cohorts.draw(0, cohorts=5)
