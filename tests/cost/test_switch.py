"""Quotes of switches count the bytes that plans move, and what shows of them by Eq. 7."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_jax.cost import (
    Load,
    StepModel,
    SwitchModel,
    cheapest_spread,
    exposed_seconds,
    load_hardware,
    quote_switch,
    spread_over_steps,
    transfer_seconds,
)
from splash_jax.cost.switch import lacking, projection_state
from splash_jax.kv import PagePool
from splash_jax.layouts import ROLES, make_layout
from splash_jax.ownership import KVShape, plan_switch
from tests.support import HYBRID_DIRECTIONS, MESHES

H200 = load_hardware("h200")
ONE = [pytest.param(a, b, {"rank": 8}) for a, b in permutations(ROLES, 2)]
TWO = [pytest.param(a, b, MESHES["2x4"]) for a, b in HYBRID_DIRECTIONS]


@pytest.mark.parametrize(("src", "dst", "mesh"), [*ONE, *TWO])
def test_a_quote_counts_what_a_plan_moves(small, src, dst, mesh):
    """To the byte, where every share of every history is a whole page; homes uneven."""
    here, there = make_layout(src, mesh), make_layout(dst, mesh)
    kv = KVShape(page_size=4, interleave=4, bytes_per_token=160)
    tokens, homes = np.array([64, 128, 32, 256, 96]), np.array([0, 3, 3, 7, 5])
    pool = PagePool(here, kv, 1000)
    for i, (count, home) in enumerate(zip(tokens.tolist(), homes.tolist(), strict=True)):
        pool.add(str(i), home)
        pool.grow(str(i), count)
    plan = plan_switch(pool.manifest(), there, pages_per_rank=1000, state=projection_state(small))
    quote = quote_switch(small, here, there, Load(tokens + 1, np.ones_like(tokens), homes), H200)
    assert quote.weight_bytes == plan.weights.bytes_per_rank
    assert quote.kv_bytes == pytest.approx(max(plan.kv.bytes_received(8)))
    messages = (quote.weight_bytes > 0) + (quote.kv_bytes > 0)
    assert quote.transfer == pytest.approx(transfer_seconds(quote.weight_bytes + quote.kv_bytes, messages, H200))
    assert quote.blocking == pytest.approx(quote.transfer * 3)
    assert quote.transfer <= quote.exposed <= quote.blocking * (1 + 1e-12)
    assert quote.cheapest <= quote.exposed


@given(
    st.integers(1, 20).flatmap(
        lambda n: st.tuples(*(st.lists(st.floats(0, 10, allow_subnormal=False), min_size=n, max_size=n) for _ in "ab"))
    )
)
@settings(max_examples=300)
def test_the_cheapest_spread_is_the_cheapest_of_all(case):
    moving, compute = [case[0][0]] * len(case[0]), case[1]
    every = {k: spread_over_steps(moving, compute, k) for k in range(1, len(moving) + 1)}
    best = min(every, key=lambda k: (every[k].exposed_total, every[k].steps))
    k, found = cheapest_spread(moving, compute)
    assert found.exposed_total <= every[best].exposed_total * (1 + 1e-12) + 1e-12
    if every[best].exposed_total == 0:
        assert found.steps == every[best].steps
    assert found == every[k]


def test_a_prefill_step_hides_what_a_decode_step_cannot(small, layouts):
    decode = Load.balanced(16, 100_000, 8)
    prefill = Load(np.full(16, 100_000), np.full(16, 4096), np.arange(16) % 8)
    steps = StepModel(small, list(layouts.values()), H200)
    switches = SwitchModel(steps)
    for src, dst in product(("dp", "cp"), ("tp",)):
        shows = [switches.quotes(layouts[src], load)[layouts[dst]].exposed for load in (decode, prefill)]
        assert shows[1] < 0.75 * shows[0]
    quotes = switches.quotes(layouts["dp"], decode)
    assert set(quotes) == set(layouts.values()) - {layouts["dp"]}
    assert quotes[layouts["dop"]].exposed == 0  # a discard
    one = quotes[layouts["cp"]]
    compute = steps.layer_seconds(decode)[list(layouts).index("cp")].tolist()
    assert one.exposed == pytest.approx(exposed_seconds([one.transfer] * 3, compute))


@pytest.mark.parametrize("T", [2, 4, 8])
def test_shares_that_lack_are_those_of_eq_2(T):
    """(1 - 1/T) of all histories into tp, (1 - 1/T) / T between cp and owners, nothing in the other five."""
    of = {name: make_layout(name, {"rank": T}) for name in ("tp", "dp", "cp", "dop")}
    into_tp, exchanged = (1 - 1 / T) * T, 1 - 1 / T  # of T histories, one at home on each rank
    for src, dst in permutations(of, 2):
        received = lacking(of[src], of[dst]).sum(0)
        expected = into_tp if dst == "tp" else exchanged if "cp" in (src, dst) and src != "tp" else 0
        assert received.tolist() == pytest.approx([expected] * T), (src, dst)
