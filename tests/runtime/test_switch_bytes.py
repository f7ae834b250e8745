"""Bytes and kinds of collectives, read from compiled programs: they are the plan's and the paper's (Eq. 2-4, S05).

And the routes that an engine compiles ahead have room for every plan it may make.
"""

from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash_jax.engine.build import state_bytes
from splash_jax.kv import PagePool
from splash_jax.layouts import ROLES, attention_mesh, make_layout
from splash_jax.models.config import ModelConfig
from splash_jax.ownership import Bucket, KVShape, Layout, SwitchPlan, apply, footprint, plan_switch
from splash_jax.ownership.manifest import owner_pages_needed
from splash_jax.ownership.plan import weight_move
from splash_jax.runtime import Programs, Route, Shapes, StepKey, SwitchKey, make_maps, make_route, plan_route
from splash_jax.runtime.collectives import Collective, collective_bytes
from tests.support import DIRECTIONS, SMALL

PAGE = 4
MODEL = ModelConfig.from_dict(SMALL, "small fixture")
C, P, H, D = MODEL.kv_lora_rank, MODEL.qk_rope_head_dim, MODEL.num_heads, MODEL.hidden_size


@cache
def programs(T: int, dtype: str = "float32") -> Programs:
    width = 4 if dtype == "float32" else 2
    kv = KVShape(page_size=PAGE, interleave=PAGE, bytes_per_token=(C + P) * width)
    shapes = Shapes(model=MODEL, dtype=dtype, kv=kv, max_model_len=64, slots=T, penalties=False)
    return Programs(attention_mesh({"rank": T}), shapes)


def layout(role: str, T: int) -> Layout:
    return make_layout(role, {"rank": T})


def balanced(src: str, dst: str, T: int) -> tuple[SwitchPlan, Route]:
    """T requests, owners i mod T, positions in equal shares; pools and route hold exactly them."""
    at = programs(T)
    pages = {role: T * T if role == "tp" else T for role in ROLES}
    pool = PagePool(layout(src, T), at.shapes.kv, pages[src])
    for i in range(T):
        pool.add(f"r{i}", i % T)
        pool.grow(f"r{i}", T * PAGE)
    state = state_bytes(MODEL, "float32", T, at.shapes.kv)
    plan = plan_switch(pool.manifest(), layout(dst, T), pages_per_rank=pages[dst], state=state)
    sends = T if plan.kv.primitive == "all_gather" else plan.kv.busiest_pair
    return plan, plan_route(at.shapes, plan, sends)


def received(found: list[Collective]) -> dict[str, int]:
    """Bytes a rank receives, by kind of collective."""
    total: Counter[str] = Counter()
    for collective in found:
        total[collective.kind] += collective.bytes_received
    return dict(total)


@pytest.mark.parametrize("T", [2, 4, 8])
@pytest.mark.parametrize(("src", "dst"), DIRECTIONS)
def test_a_transfer_moves_what_the_plan_says(src, dst, T):
    plan, route = balanced(src, dst, T)
    compiled = programs(T).lower(SwitchKey(route=route)).compile()

    Bsk = T * T * PAGE * plan.before.kv.bytes_per_token
    W = 4 * (MODEL.q_lora_rank * H * (16 + P) + H * 16 * C + H * C * 16 + H * 16 * D)
    expected: Counter[str] = Counter()
    if src in ("tp", "dop") and dst in ("cp", "dp"):
        expected["all-gather"] += W * (T - 1) // T
    if dst == "tp":
        expected["all-gather"] += Bsk * (T - 1) // T
    elif {src, dst} in ({"cp", "dp"}, {"cp", "dop"}):
        expected["all-to-all"] += Bsk * (T - 1) // T // T

    found = collective_bytes(compiled)
    assert received(found) == dict(expected)
    assert {c.group_size for c in found} <= {T}
    moved = {rank: sum(expected.values()) for rank in range(T)}
    assert plan.bytes_per_rank() == [plan.num_layers * moved[rank] for rank in range(T)]

    # Eq. 5: at no time more than the larger of the two states and one layer's whole buffers.
    memory, state = compiled.memory_analysis(), state_bytes(MODEL, "float32", T, plan.before.kv)
    pages = max(route.src_pages, route.dst_pages)
    transit = footprint(state, route.dst, pages=pages, page_size=PAGE).transit
    assert memory.temp_size_in_bytes <= transit
    live = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    larger = max(memory.argument_size_in_bytes, memory.output_size_in_bytes)
    assert live + memory.temp_size_in_bytes - larger <= transit


def layer_collectives(
    role: str, T: int, kind: str = "dense", dtype: str = "float32", rows: int = 2
) -> list[Collective]:
    at, bucket = programs(T, dtype), Bucket(decode=rows, tiles=0, tile=4)
    lowered = at.lower(StepKey(part=kind, layout=layout(role, T), bucket=bucket, pages=T))
    # What is asked for, before CPU widens bfloat16 to float32; for float32 tests read the compiled program.
    return collective_bytes(lowered.compile() if dtype == "float32" else lowered.compiler_ir("hlo").as_hlo_text())


def dop_exchange(T: int, rows: int, q_bytes: int, z_bytes: int) -> int:
    """Eq. 4 in aggregate over the ranks: (1 - 1/T) N H (d_q + d_z) b."""
    N = T * rows
    return N * H * ((C + P) * q_bytes + C * z_bytes) * (T - 1) // T


def exchanged(found: list[Collective], T: int) -> int:
    return T * sum(c.bytes_received for c in found if c.kind == "all-to-all")


@pytest.mark.parametrize("T", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_dop_layer_exchanges_what_eq_4_says(T):
    found = layer_collectives("dop", T)
    assert [c.kind for c in found].count("all-to-all") == 2
    assert exchanged(found, T) == dop_exchange(T, 2, 4, 4)
    sums = [c for c in found if c.kind != "all-to-all"]  # what Eq. 4 leaves out: output projection and MLP
    assert [(c.kind, c.result_bytes) for c in sums] == [("all-reduce", T * 2 * D * 4)] * 2


def test_a_dop_layer_exchanges_serving_types():
    found = layer_collectives("dop", 4, dtype="bfloat16")
    assert exchanged(found, 4) == dop_exchange(4, 2, 2, 2)


ROW = D * 4
LAYERS = {
    # Of N rows in the step: every sum of partial results, and nothing else.
    "tp": [("all-reduce", 2 * ROW), ("all-reduce", 2 * ROW)],
    # Rows are gathered for the MLP and its sums scattered; attention is local.
    "dp": [("all-gather", 8 * ROW), ("reduce-scatter", 2 * ROW)],
    # Largest log-sum-exp, then weighted outputs with their weights, then the MLP.
    "cp": [("all-reduce", 2 * H * 4), ("all-reduce", 2 * H * (C + 1) * 4), ("all-reduce", 2 * ROW)],
}


@pytest.mark.parametrize("kind", ["dense", pytest.param("moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", LAYERS)
def test_collectives_of_a_layer(role, kind):
    """Two rows per owner on four ranks. Experts add nothing: routing is replicated."""
    found = layer_collectives(role, 4, kind)
    assert sorted((c.kind, c.result_bytes) for c in found) == sorted(LAYERS[role])


@pytest.mark.parametrize(
    ("src", "dst"), [("tp", "cp"), *(pytest.param(*d, marks=pytest.mark.slow) for d in DIRECTIONS if d != ("tp", "cp"))]
)
def test_beside_a_layer_a_transfer_adds_its_own_bytes_only(src, dst):
    plan, route = balanced(src, dst, 4)
    bucket = Bucket(decode=2, tiles=0, tile=4)
    both = collective_bytes(programs(4).lower(SwitchKey(route=route, kind="dense", bucket=bucket)).compile())
    layer = LAYERS.get(dst) or [(c.kind, c.result_bytes) for c in layer_collectives(dst, 4)]
    transfer = [c for c in both if "switch.move" in c.scope]
    assert sorted((c.kind, c.result_bytes) for c in both if c not in transfer) == sorted(layer)
    assert sum(c.bytes_received for c in transfer) == plan.bytes_per_rank()[0] // plan.num_layers


@st.composite
def engine_plans(draw):
    """Any switch an engine may ask for: requests within its slots, pools that hold them, homes anew from tp and cp."""
    T, (src, dst) = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from(DIRECTIONS))
    kv = KVShape(page_size=PAGE, interleave=draw(st.sampled_from([1, 2, PAGE])), bytes_per_token=8)
    homes = st.integers(0, T - 1)
    requests = draw(st.lists(st.tuples(homes, st.integers(0, 40), homes), max_size=4))
    anew = src in ("tp", "cp") and dst in ("dp", "dop")
    old = {f"r{i}": (home, tokens) for i, (home, tokens, _) in enumerate(requests)}
    new = {f"r{i}": (other if anew else home, tokens) for i, (home, tokens, other) in enumerate(requests)}
    need = [max(owner_pages_needed(kv, layout(r, T), at), default=0) for r, at in ((src, old), (dst, new))]
    pages = [1 + n + draw(st.integers(0, 9)) for n in need]
    pool = PagePool(layout(src, T), kv, pages[0])
    pool._free = [draw(st.permutations(free)) for free in pool._free]
    for name, (home, tokens) in old.items():
        pool.add(name, home)
        pool.grow(name, tokens)
    state = state_bytes(MODEL, "float32", 1, kv)
    plan = plan_switch(
        pool.manifest(), layout(dst, T), pages_per_rank=pages[1], state=state, homes={n: h for n, (h, _) in new.items()}
    )
    return plan, Shapes(model=MODEL, dtype="float32", kv=kv, max_model_len=64, slots=4, penalties=False)


@given(engine_plans())
def test_the_route_that_is_compiled_ahead_carries_every_plan(situation):
    """The rounds of the executor in numpy: what arrives is what `apply` says, however uneven."""
    plan, shapes = situation
    route, T = plan_route(shapes, plan), plan.before.layout.size
    per_page = PAGE // route.grain
    rng = np.random.default_rng(0)
    old = [rng.normal(size=(route.src_pages * per_page, 1)) for _ in range(T)]
    size = route.dst_pages * per_page
    new = [np.concatenate([a[:size], np.zeros((max(0, size - len(a)), 1))]) for a in old]
    source = old
    for maps in make_maps(route, plan.kv):
        taken = [source[r][np.minimum(maps.read[r], len(source[r]) - 1)] for r in range(T)]
        sent, n = [a[route.locals :] for a in taken], route.sends
        for rank in range(T):
            mine = sent if route.gathers else [a[rank * n : (rank + 1) * n] for a in sent]
            arrived = np.concatenate([taken[rank][: route.locals], *(mine if n else [])])
            real = maps.write[rank] < size
            new[rank] = new[rank].copy()
            new[rank][maps.write[rank][real]] = arrived[real]
        source = new
    for got, want in zip(new, apply(plan, old), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("src", "dst"), [("cp", "dp"), ("dop", "cp")])
def test_large_pools_move_within_the_room_kept_free(src, dst):
    """Eq. 5 with the route that an engine compiles, where pages outweigh projections as they do on real devices."""
    pages, at = {"dop": 4800, "cp": 4000, "dp": 4000}, programs(4)
    state = state_bytes(MODEL, "float32", 4, at.shapes.kv)
    here, there = layout(src, 4), layout(dst, 4)
    route = make_route(at.shapes, here, there, pages[src], pages[dst], weight_move(here, there, state))
    memory = at.lower(SwitchKey(route=route)).compile().memory_analysis()
    live = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    more = live + memory.temp_size_in_bytes - max(memory.argument_size_in_bytes, memory.output_size_in_bytes)
    assert more <= footprint(state, there, pages=max(pages[src], pages[dst]), page_size=PAGE).transit
