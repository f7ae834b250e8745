"""The compiled transfers do to arrays, bit by bit, what `ownership.apply` says."""

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from pallas_kernels.page_move import gather_pages, scatter_pages
from splash_jax.kv import PagePool
from splash_jax.layouts import ROLES, attention_mesh, local_spec, make_layout, pool_spec, weight_spec
from splash_jax.models.config import ModelConfig
from splash_jax.models.deepseek_v3_weights import model_leaves
from splash_jax.ownership import Bucket, KVShape, Layout, StateBytes, SwitchPlan, apply, plan_switch
from splash_jax.runtime import (
    Batch,
    DeviceState,
    Programs,
    Shapes,
    StepKey,
    SwitchKey,
    SwitchMode,
    fresh_state,
    make_maps,
    plan_route,
    prepare_switch,
    run_step,
)
from splash_jax.runtime import pages as by_number
from splash_jax.runtime.transfer import Route, in_chunks
from tests.support import DIRECTIONS, HYBRID_DIRECTIONS, HYBRIDS, MESHES, SMALL

T, PAGE = 4, 4
MODES = (SwitchMode.SPLASH, SwitchMode.BLOCKING)
TINY = SMALL | {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "kv_lora_rank": 6,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "q_lora_rank": None,
}
MODEL = ModelConfig.from_dict(TINY, "tiny")
UNEVEN = {"a": (0, 17), "b": (0, 1), "c": (1, 0), "d": (2, 5), "e": (3, 8)}
LAYOUTS = {role: make_layout(role, {"rank": T}) for role in ROLES}
LAYOUTS |= {name: make_layout(name, MESHES["2x2"]) for name in HYBRIDS}
PAGES = {name: 17 - i % len(ROLES) for i, name in enumerate(LAYOUTS)}  # every switch makes pools grow or shrink
STATE = StateBytes(projections=4 * 1000, common=0, kv_per_token=32, num_layers=2)


class Stubbed(Programs):
    """Real transfers; the steps around them only hand on what they get."""

    def get(self, key: Any) -> Any:
        if isinstance(key, StepKey):
            parts = {"embed": lambda table, last, rows: rows, "head": lambda w, sampler, *_: (sampler, None)}
            return parts.get(key.part, lambda w, x, pool, *_: (x, pool))
        if key.kind is not None:
            transfer = super().get(replace(key, kind=None, bucket=None))
            return lambda w, x, pool, rows, local, *state: (x, pool, *transfer(*state))
        return super().get(key)


def mesh(layout: Layout) -> Mesh:
    return attention_mesh({axis.name: axis.size for axis in layout.axes})


@cache
def programs(interleave: int, name: str = "tp") -> Stubbed:
    """Programs of the mesh that a layout is of."""
    kv = KVShape(page_size=PAGE, interleave=interleave, bytes_per_token=32)
    shapes = Shapes(model=MODEL, dtype="float32", kv=kv, max_model_len=32, slots=5, penalties=False)
    return Stubbed(mesh(LAYOUTS[name]), shapes)


def make_plan(src: Layout, dst: Layout, kv: KVShape, pages: tuple[int, int], requests: Any = None, **more: Any) -> Any:
    pool = PagePool(src, kv, pages[0])
    holes = 2 if pages[0] > 9 else 0
    for name, (home, tokens) in {"hole": (0, holes * PAGE), **(UNEVEN if requests is None else requests)}.items():
        pool.add(name, home)
        pool.grow(name, tokens)
    pool.release("hole")
    return plan_switch(pool.manifest(), dst, pages_per_rank=pages[1], state=STATE, **more)


def random_pool(plan: SwitchPlan, seed: int) -> np.ndarray:
    """Any numbers on held pages, NaN on free ones: f32[T, pages, page size, width]."""
    before = plan.before
    held = np.zeros((T, before.pages_per_rank), bool)
    for request in before.requests.values():
        for rank, pages in request.pages.items():
            held[rank, list(pages)] = True
    shape = (T, before.pages_per_rank, PAGE, 8)
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return np.where(held[..., None, None], values, np.float32(np.nan))


def expected_pool(plan: SwitchPlan, pool: np.ndarray) -> np.ndarray:
    slots = [rank.reshape(-1, plan.kv.grain, 8) for rank in pool]
    return np.stack([a.reshape(-1, PAGE, 8) for a in apply(plan, slots)])


def assert_live_pages_finite(plan: SwitchPlan, pool: np.ndarray) -> None:
    kv, layout = plan.after.kv, plan.after.layout
    for request in plan.after.requests.values():
        for rank, pages in request.pages.items():
            held = kv.tokens_held(layout, layout.lag(request.home, rank), request.num_tokens)
            assert np.isfinite(pool[rank, list(pages)].reshape(-1, 8)[:held]).all()


def bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


def put(values: np.ndarray, layout: Layout) -> jax.Array:
    return jax.device_put(values, NamedSharding(mesh(layout), pool_spec(layout)))


def laid_out(values: dict[str, np.ndarray], layout: Layout) -> dict[str, np.ndarray]:
    """Whole weights with their heads in the order in which a layout's ranks hold them."""
    leaves, order = model_leaves(MODEL, T)["layers"][0]["moved"], layout.head_blocks()
    cut = {name: np.split(values[name], T, leaf.dims.index("heads")) for name, leaf in leaves.items()}
    return {name: np.concatenate([cut[name][i] for i in order], leaves[name].dims.index("heads")) for name in cut}


def make_weights(layout: Layout, seed: int) -> tuple[dict[str, np.ndarray], dict[str, jax.Array]]:
    leaves, rng = model_leaves(MODEL, T)["layers"][0]["moved"], np.random.default_rng(seed)
    values = {name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in leaves.items()}
    return values, {
        name: jax.device_put(array, NamedSharding(mesh(layout), weight_spec(layout, leaves[name].dims)))
        for name, array in laid_out(values, layout).items()
    }


def assert_weights(arrays: dict[str, jax.Array], values: dict[str, np.ndarray], layout: Layout) -> None:
    """Every rank holds its part of the same numbers, bit by bit."""
    leaves = model_leaves(MODEL, T)["layers"][0]["moved"]
    assert set(arrays) == set(values) == set(leaves)
    for name, whole in laid_out(values, layout).items():
        array, wanted = arrays[name], NamedSharding(mesh(layout), weight_spec(layout, leaves[name].dims))
        assert array.sharding.is_equivalent_to(wanted, array.ndim)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(bits(shard.data), bits(np.ascontiguousarray(whole[shard.index])))


def transfer_cases() -> list[object]:
    """All directions, with positions dealt singly and by the page. By default one of both, and half of the hybrids."""
    cases = []
    for n, (src, dst) in enumerate((*DIRECTIONS, *HYBRID_DIRECTIONS)):
        for i, interleave in enumerate((1, PAGE)):
            usual = i == n % 2 and (src in ROLES or n // 2 % 2 == 0)
            cases.append(pytest.param(src, dst, interleave, marks=() if usual else pytest.mark.slow))
    return cases


@pytest.mark.parametrize(("src", "dst", "interleave"), transfer_cases())
def test_a_transfer_is_apply(src, dst, interleave):
    """Uneven owners, pools that change size, empty and page-crossing histories, NaN wherever nothing is held."""
    at = programs(interleave, src)
    plan = make_plan(LAYOUTS[src], LAYOUTS[dst], at.shapes.kv, (PAGES[src], PAGES[dst]))
    route = plan_route(at.shapes, plan)
    if route.in_rounds:  # so many that a gather needs one round
        route = plan_route(at.shapes, plan, 32)
    check_transfer(at, plan, route)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(
    ("src", "dst"),
    [("dp", "tp"), ("cp", "dop"), ("tp", "cp"), ("dop", "dcp"), ("node=dop,chip=cp", "node=cp,chip=dcp")],
)
def test_a_transfer_in_chunks_is_apply(src, dst, chunks):
    at = programs(1, src)
    plan = make_plan(LAYOUTS[src], LAYOUTS[dst], at.shapes.kv, (PAGES[src], PAGES[dst]))
    check_transfer(at, plan, in_chunks(plan_route(at.shapes, plan, 32), chunks))


def test_a_move_larger_than_the_bound_comes_in_chunks():
    at = programs(1)
    plan = make_plan(LAYOUTS["dp"], LAYOUTS["cp"], at.shapes.kv, (PAGES["dp"], PAGES["cp"]))
    whole = plan_route(at.shapes, plan)
    grain = T * plan.kv.grain_bytes  # of every rank one
    received = whole.sends * grain
    for bound, chunks in ((received, 1), (received - 1, 2), (-(-whole.sends // 3) * grain, 3)):
        route = plan_route(replace(at.shapes, transfer_bytes=bound), plan)
        assert route.chunks == chunks
        assert route.sends // chunks * grain <= bound


@pytest.mark.parametrize(("src", "dst", "chunks"), [("dp", "tp", 1), ("cp", "dop", 2), ("dop", "cp", 1)])
def test_page_kernels_move_what_xla_does(src, dst, chunks, monkeypatch):
    """In interpret mode: the programs that an engine on a GPU of theirs has."""
    called = []

    def interpreted(kernel: Any) -> Any:
        def call(*args: Any, backend: str) -> Any:
            called.append(kernel.__name__)
            return kernel(*args, backend=backend, interpret=True)

        return call

    for kernel in (gather_pages, scatter_pages):
        monkeypatch.setattr(by_number, kernel.__name__, interpreted(kernel))
    shapes = replace(programs(1, src).shapes, attention_backend="gpu", attention_chip="h200")
    plan = make_plan(LAYOUTS[src], LAYOUTS[dst], shapes.kv, (PAGES[src], PAGES[dst]))
    route = in_chunks(plan_route(shapes, plan, 32), chunks)
    check_transfer(Stubbed(mesh(LAYOUTS[src]), shapes), plan, route)
    assert set(called) == {"gather_pages", "scatter_pages"}


def check_transfer(at: Stubbed, plan: SwitchPlan, route: Route) -> None:
    """The program of a route does bit by bit what `apply` does."""
    src, dst = route.src, route.dst
    pool = random_pool(plan, 1)
    values, weights = make_weights(src, 2)
    (maps,) = make_maps(route, plan.kv)
    dealt = NamedSharding(mesh(route.src), local_spec(route.src))
    moved, arrived = at.get(SwitchKey(route=route))(
        weights, put(pool, src), *jax.device_put((maps.read, maps.write), (dealt, dealt))
    )
    arrived = np.asarray(arrived)
    np.testing.assert_array_equal(bits(arrived), bits(expected_pool(plan, pool)))
    assert_live_pages_finite(plan, arrived)
    assert_weights(moved, values, dst)


def device_state(plan: SwitchPlan, src: Layout) -> tuple[DeviceState, list[np.ndarray], list[dict[str, np.ndarray]]]:
    pools = [random_pool(plan, layer) for layer in range(2)]
    both = [make_weights(src, 10 + layer) for layer in range(2)]
    weights: dict[str, Any] = {"embed": None, "final_norm": None, "lm_head": None}
    weights["layers"] = [{"moved": arrays} for _, arrays in both]
    state = DeviceState(
        weights=weights,
        pools=[put(pool, src) for pool in pools],
        sampler=fresh_state(mesh(src), programs(PAGE).shapes),
        layout=src,
        pages=plan.before.pages_per_rank,
    )
    return state, pools, [values for values, _ in both]


def empty_batch() -> Batch:
    i32 = np.zeros((T, 1), np.int32)
    return Batch(rows=np.zeros((3, 1), np.int32), local=i32, picks=i32[0], floats=i32.astype(np.float32), ints=i32)


def switch_in_a_step(
    at: Stubbed, plan: SwitchPlan, sends: int | None = None, mode: SwitchMode = SwitchMode.SPLASH
) -> DeviceState:
    """Run a step that switches, check everything that arrived, and that nothing of the source is left."""
    src, dst = plan.before.layout, plan.after.layout
    state, pools, values = device_state(plan, src)
    old = [*state.pools, *jax.tree.leaves(state.weights["layers"])]
    route = plan_route(at.shapes, plan, sends)
    bucket = Bucket(decode=1, tiles=0, tile=4)
    run_step(at, state, bucket, empty_batch(), switch=prepare_switch(at, plan, route, mode))
    assert (state.layout, state.pages) == (dst, plan.after.pages_per_rank)
    assert all(array.is_deleted() for array in old)
    for layer in range(2):
        got = np.asarray(state.pools[layer])
        np.testing.assert_array_equal(bits(got), bits(expected_pool(plan, pools[layer])))
        assert_weights(state.weights["layers"][layer]["moved"], values[layer], dst)
    return state


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("src", "dst"), [*itertools.pairwise((*ROLES, "tp")), *itertools.pairwise(HYBRIDS)])
def test_a_step_with_a_switch_leaves_no_source_buffer(src, dst, mode):
    at = programs(PAGE, src)
    plan = make_plan(LAYOUTS[src], LAYOUTS[dst], at.shapes.kv, (PAGES[src], PAGES[dst]))
    switch_in_a_step(at, plan, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("src", "dst"), [("dp", "tp"), ("cp", "tp"), ("dop", "rep"), ("node=dp,chip=tp", "node=tp,chip=dp")]
)
def test_a_lopsided_gather_takes_several_rounds(src, dst, mode):
    """One rank owns everything, and a round has room for an even share only, or for less."""
    at = programs(PAGE, src)
    requests = {"a": (1, 17), "b": (1, 13)}
    plan = make_plan(LAYOUTS[src], LAYOUTS[dst], at.shapes.kv, (14, 14), requests)
    sends = {"cp": 1, "node=dp,chip=tp": 3}.get(src)
    route = plan_route(at.shapes, plan, sends)
    rounds = make_maps(route, plan.kv)
    assert len(rounds) == 3
    width = route.sends * route.group
    assert all((m.read.shape, m.write.shape) == ((T, route.sends), (T, width)) for m in rounds)
    switch_in_a_step(at, plan, sends, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_switch_that_moves_nothing_dispatches_nothing(mode):
    at = programs(PAGE)
    plan = make_plan(LAYOUTS["tp"], LAYOUTS["dop"], at.shapes.kv, (12, 12))
    state, _, _ = device_state(plan, LAYOUTS["tp"])
    before = list(state.pools)
    switch = prepare_switch(at, plan, plan_route(at.shapes, plan), mode)
    run_step(at, state, Bucket(decode=1, tiles=0, tile=4), empty_batch(), switch=switch)
    assert state.layout == LAYOUTS["dop"]
    assert all(a is b and not a.is_deleted() for a, b in zip(before, state.pools, strict=True))


def test_requests_may_change_their_homes_on_the_way():
    at = programs(PAGE)
    homes = {"a": 3, "b": 2, "d": 0}
    switch_in_a_step(at, make_plan(LAYOUTS["cp"], LAYOUTS["dp"], at.shapes.kv, (8, 9), homes=homes))


def test_a_plan_that_the_route_has_no_room_for_is_refused():
    at = programs(PAGE)
    plan = make_plan(LAYOUTS["cp"], LAYOUTS["dp"], at.shapes.kv, (8, 9), {"a": (0, 32)})
    with pytest.raises(ValueError, match="a pair of ranks exchanges 2 grains; the route has room for 1"):
        make_maps(plan_route(at.shapes, plan, 1), plan.kv)
    fine = make_plan(LAYOUTS["cp"], LAYOUTS["dp"], programs(1).shapes.kv, (8, 9))
    with pytest.raises(ValueError, match="the plan moves grains of 1 tokens, the route of 4"):
        make_maps(plan_route(at.shapes, plan), fine.kv)


def test_a_route_that_sends_nothing_refuses_a_plan_that_does():
    at = programs(PAGE)
    plan = make_plan(LAYOUTS["dp"], LAYOUTS["dop"], at.shapes.kv, (9, 9), homes={"a": 3})
    assert plan.kv.sent
    with pytest.raises(ValueError, match="room for none"):
        make_maps(plan_route(at.shapes, plan, 0), plan.kv)
    assert make_maps(plan_route(at.shapes, plan), plan.kv)  # unless told otherwise, a route has room for its plan
