"""Regime maps, walls and break-evens: each says what single estimates and capacities say."""

from dataclasses import replace

import numpy as np
import pytest

from splash_jax.cost import Capacity, Load, StepModel, SwitchModel, capacity, load_hardware
from splash_jax.cost.regimes import CAPACITY, break_even, regime_map, switch_costs, wall_order
from splash_jax.cost.served import ServedModel
from splash_jax.cost.suitable import why_unsuitable
from splash_jax.errors import ConfigError
from splash_jax.ownership import StateBytes
from splash_jax.preflight.case import read_model

B200 = load_hardware("b200")
GLM = ServedModel(sizes=read_model("glm-5.3"), weight_bytes=1, activation_bytes=2, kv_bytes_per_token=656)
STATE = StateBytes(projections=142 * 2**20, common=87 * 2**30, kv_per_token=656, num_layers=78)


@pytest.fixture(scope="module")
def steps(layouts) -> StepModel:
    return StepModel(GLM, list(layouts.values()), B200)


@pytest.fixture(scope="module")
def rooms(layouts) -> dict:
    return {one: capacity(STATE, one, page_size=64, budget=165 * 2**30) for one in layouts.values()}


def test_a_map_is_made_of_estimates_and_capacities(steps, rooms):
    made = regime_map(steps, rooms, [1024, 131_072, 10_000_000], [1, 16, 128])
    for i, context in enumerate([1024, 131_072, 10_000_000]):
        for j, batch in enumerate([1, 16, 128]):
            found = steps.seconds(Load.balanced(batch, context, 8))
            fitting = {
                k: e.seconds for k, (one, e) in enumerate(found.items()) if rooms[one].longest(batch, one) >= context
            }
            assert made.fits[i, j].nonzero()[0].tolist() == list(fitting)
            assert made.fastest[i, j] == (min(fitting, key=fitting.get) if fitting else -1)
            assert made.seconds[i, j].tolist() == [e.seconds for e in found.values()]
    assert made.fastest[2, 2] == -1 and np.isnan(made.lead[2, 2]) and made.lead[0, 0] > 0


def test_few_short_requests_want_split_projections_and_ten_million_tokens_only_shares_of_positions(
    steps, rooms, layouts
):
    """The regimes of Figure 1, from published peaks: tp first, then owners, then positions where one rank is full."""
    names = [str(one) for one in steps.layouts]
    made = regime_map(steps, rooms, [1024, 32_768, 10_000_000], [1, 64])
    best = [[names[k] if k >= 0 else None for k in row] for row in made.fastest]
    assert best[0][0] == "tp" and best[1][1] in ("dp", "dop") and best[2][0] in ("cp", "dcp")
    assert {names[k] for k in made.fits[2, 0].nonzero()[0]} == {"cp", "dcp"}
    with pytest.raises(ConfigError, match=r"needs contexts and batches, all of at least 1; got \[\] and \[1\]"):
        regime_map(steps, rooms, [], [1])


@pytest.mark.parametrize("name", ["tp", "dp", "cp", "dop", "dcp", "rep"])
def test_walls_stand_where_estimates_change_what_binds(steps, rooms, layouts, name):
    one = layouts[name]
    for given, say in (({"context": 131_072}, "batch"), ({"batch": 16}, "context")):
        walls = wall_order(steps, one, rooms[one], **given)
        assert walls[-1].resource == CAPACITY and walls[0].at == 1
        assert [w.at for w in walls] == sorted({w.at for w in walls})
        ask = lambda n, given=given: (given.get("batch", n), given.get("context", n))  # noqa: E731
        full = walls[-1].at
        assert rooms[one].longest(ask(full)[0], one) < ask(full)[1] <= 10**9
        assert rooms[one].longest(ask(full - 1)[0], one) >= ask(full - 1)[1], say
        for wall in walls[:-1]:
            assert steps.seconds(Load.balanced(*ask(wall.at), 8))[one].bound == wall.resource


def test_walls_of_what_does_not_fit_or_is_asked_both_ways(steps, layouts):
    assert [w.resource for w in wall_order(steps, layouts["tp"], None, batch=1)] == [CAPACITY]
    with pytest.raises(ConfigError, match="the other one grows; got None and None"):
        wall_order(steps, layouts["tp"], None)


def test_an_exchange_costs_nothing_on_free_links_and_everything_on_slow_ones(rooms, layouts):
    """Free, it saves reading weights until all rows' Q-A and KV-A on every rank count; dear, it is slower at once."""
    pair = layouts["dop"], layouts["dp"]
    free = replace(B200, message_latency_s=1e-15, interconnect_bytes_per_s=1e30)
    slow = replace(B200, message_latency_s=1e-3)
    at = lambda chip: break_even(StepModel(GLM, pair, chip), rooms, *pair, 131_072)  # noqa: E731
    assert (at(free).slower_from or 1 << 20) > 500 and at(slow).slower_from == 1
    between = at(replace(B200, message_latency_s=1e-6))
    assert between.slower_from is not None and between.slower_from > 8
    steps = StepModel(GLM, pair, replace(B200, message_latency_s=1e-6))
    for batch, slower in ((between.slower_from, True), (between.slower_from - 8, False)):
        found = steps.seconds(Load.balanced(batch, 131_072, 8))
        assert (found[pair[0]].seconds > found[pair[1]].seconds) == slower
    assert between.requests == tuple(rooms[one].tokens // 8 // 131_072 * 8 for one in pair)
    assert at(free).gain > between.gain > at(slow).gain and at(free).gain > 0


def test_what_returned_memory_is_worth_where_only_one_fits(layouts):
    pair = layouts["dop"], layouts["dp"]
    room = {pair[0]: Capacity(pages=4096, tokens=8 * 4096 * 64)}
    assert break_even(StepModel(GLM, pair, B200), room, *pair, 131_072).gain == np.inf
    assert np.isnan(break_even(StepModel(GLM, pair, B200), {}, *pair, 131_072).gain)


def test_switches_cost_more_with_context_and_spreading_never_more_than_one_step(steps):
    contexts = [16_384, 131_072, 1_048_576, 10_000_000]
    found = switch_costs(SwitchModel(steps), 16, contexts)
    assert len(found) == 30
    for (src, dst), quotes in found.items():
        moved = [q.kv_bytes for q in quotes]
        assert moved == sorted(moved) and len({q.weight_bytes for q in quotes}) == 1
        if moved[0]:
            assert moved[-1] == pytest.approx(moved[0] * 10_000_000 / 16_384, rel=1e-3)
        for quote in quotes:
            assert quote.spread.exposed_total <= quote.blocking + 1e-12, (str(src), str(dst))
    dp_tp = next(quotes for (a, b), quotes in found.items() if (str(a), str(b)) == ("dp", "tp"))
    assert dp_tp[-1].exposed > 50 * dp_tp[1].exposed


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama", "num_attention_heads": 32}, "32 KV heads for 32 query heads: its KV is split by head"),
        (
            {"num_attention_heads": 32, "num_key_value_heads": 8},
            "8 KV heads for 8 ranks: tensor parallelism splits its",
        ),
        ({"num_attention_heads": 32, "num_key_value_heads": 2}, "holds each 4 times, and dop would return that"),
        ({"num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512}, None),
        ({"num_attention_heads": "many"}, None),
    ],
)
def test_models_whose_kv_is_split_by_head_are_told_what_still_works(config, words):
    found = why_unsuitable(config, 8)
    assert (found is None) == (words is None)
    if words is not None and found is not None:
        assert words in found and "MLA models only" in found
        if "query heads: its KV" in words:
            assert "What still works, elsewhere: tp up to one head per rank, and dp or cp" in found
