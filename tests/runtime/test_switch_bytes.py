"""Bytes and kinds of collectives, read from compiled programs: they are the plan's and the paper's (Eq. 2-4, S05).

And the routes that an engine compiles ahead have room for every plan it may make.
"""

import itertools
import math
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
from splash_jax.ownership import Bucket, KVShape, Layout, SwitchPlan, apply, footprint, free_axes, plan_switch
from splash_jax.ownership.manifest import owner_pages_needed
from splash_jax.ownership.plan import weight_move
from splash_jax.runtime import Programs, Route, Shapes, StepKey, SwitchKey, make_maps, make_route, plan_route
from splash_jax.runtime.collectives import Collective, collective_bytes
from splash_jax.runtime.transfer import lacks_room
from tests.support import DIRECTIONS, HYBRID_DIRECTIONS, MESHES, SMALL

PAGE = 4
MODEL = ModelConfig.from_dict(SMALL, "small fixture")
C, P, H, D = MODEL.kv_lora_rank, MODEL.qk_rope_head_dim, MODEL.num_heads, MODEL.hidden_size


SPLIT = ("tp", "dop", "dcp")
HISTORY = {"tp": "all", "rep": "all", "dp": "request", "dop": "request", "cp": "position", "dcp": "position"}
W = 4 * (MODEL.q_lora_rank * H * (16 + P) + H * 16 * C + H * C * 16 + H * 16 * D)  # bytes of one layer's projections


@cache
def programs(mesh: int | str, dtype: str = "float32") -> Programs:
    """Programs on one axis of so many ranks, or on a mesh of a name."""
    width = 4 if dtype == "float32" else 2
    kv = KVShape(page_size=PAGE, interleave=PAGE, bytes_per_token=(C + P) * width)
    sizes = {"rank": mesh} if isinstance(mesh, int) else MESHES[mesh]
    slots = math.prod(sizes.values())
    shapes = Shapes(model=MODEL, dtype=dtype, kv=kv, max_model_len=64, slots=slots, penalties=False)
    return Programs(attention_mesh(sizes), shapes)


def layout(roles: str, mesh: int | str) -> Layout:
    return make_layout(roles, {"rank": mesh} if isinstance(mesh, int) else MESHES[mesh])


def balanced(src: str, dst: str, mesh: int | str) -> tuple[SwitchPlan, Route]:
    """T requests, owners i mod T, positions in equal shares; pools and route hold exactly them."""
    at, here, there = programs(mesh), layout(src, mesh), layout(dst, mesh)
    T = here.size
    pages = {one: T * T // (one.owner_groups * one.position_shares) for one in (here, there)}
    pool = PagePool(here, at.shapes.kv, pages[here])
    for i in range(T):
        pool.add(f"r{i}", i % T)
        pool.grow(f"r{i}", T * PAGE)
    state = state_bytes(MODEL, "float32", T, at.shapes.kv)
    plan = plan_switch(pool.manifest(), there, pages_per_rank=pages[there], state=state)
    route = plan_route(at.shapes, plan, 0)
    return plan, plan_route(at.shapes, plan, max((len(g) for g in by_buffer(route, plan).values()), default=0))


def by_buffer(route: Route, plan: SwitchPlan) -> dict[object, set[int]]:
    """What a rank puts into one buffer: for all ranks where they are gathered, else for one other."""
    found: dict[object, set[int]] = {}
    for pair, grains in plan.kv.sent.items():
        found.setdefault(pair[0] if route.gathers else pair, set()).update(grains[:, 0].tolist())
    return found


def received(found: list[Collective]) -> dict[str, int]:
    """Bytes a rank receives, by kind of collective."""
    total: Counter[str] = Counter()
    for collective in found:
        total[collective.kind] += collective.bytes_received
    return dict(total)


def one_of_three(sizes: tuple[int, int, int]) -> list[object]:
    """Every direction on every number of ranks; by default each on one of them."""
    cases = itertools.product(enumerate(DIRECTIONS), enumerate(sizes))
    return [
        pytest.param(src, dst, T, marks=() if n % 3 == i else pytest.mark.slow) for (n, (src, dst)), (i, T) in cases
    ]


@pytest.mark.parametrize(("src", "dst", "T"), one_of_three((2, 4, 8)))
def test_a_transfer_moves_what_the_plan_says(src, dst, T):
    plan, route = balanced(src, dst, T)
    compiled = programs(T).lower(SwitchKey(route=route)).compile()

    Bsk = T * T * PAGE * plan.before.kv.bytes_per_token
    expected: Counter[str] = Counter()
    if src in SPLIT and dst not in SPLIT:
        expected["all-gather"] += W * (T - 1) // T
    if HISTORY[src] != "all" and HISTORY[dst] == "all":
        expected["all-gather"] += Bsk * (T - 1) // T
    elif HISTORY[src] != "all" and HISTORY[src] != HISTORY[dst]:
        expected["all-to-all"] += Bsk * (T - 1) // T // T

    found = collective_bytes(compiled)
    assert received(found) == dict(expected)
    assert {c.group_size for c in found} <= {T}
    moved = {rank: sum(expected.values()) for rank in range(T)}
    assert plan.bytes_per_rank() == [plan.num_layers * moved[rank] for rank in range(T)]
    check_memory(compiled, route)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("src", "dst"),
    [pytest.param(*pair, marks=() if i % 4 == 0 else pytest.mark.slow) for i, pair in enumerate(HYBRID_DIRECTIONS)],
)
def test_a_transfer_of_hybrids_moves_what_the_plan_says(src, dst, mesh):
    """Weights and gathers to the byte, along no axis where nothing lacks; an exchange pads to its fullest pair."""
    plan, route = balanced(src, dst, mesh)
    compiled = programs(mesh).lower(SwitchKey(route=route)).compile()
    found = collective_bytes(compiled)
    before, after = (set(one.head_axes) for one in (route.src, route.dst))
    sizes = MESHES[mesh]
    parts = lambda axes: math.prod(sizes[axis] for axis in axes)  # noqa: E731
    weights = W // parts(after) - W // parts(before | after)
    buffers = by_buffer(route, plan)
    kv = (route.group - 1) * route.sends * plan.kv.grain_bytes
    assert plan.weights.bytes_per_rank == weights
    assert sum(c.bytes_received for c in found) == weights + kv
    assert {c.group_size for c in found if c.kind == "all-to-all"} <= {route.group}
    if route.sends and (route.gathers or len(buffers) == route.src.size * (route.group - 1)):
        assert {len(grains) for grains in buffers.values()} == {route.sends}
        assert plan.kv.bytes_received(route.src.size) == [kv] * route.src.size
    check_memory(compiled, route)


def check_memory(compiled, route: Route) -> None:
    """Eq. 5: at no time more than the larger of the two states and one layer's whole buffers."""
    kv = programs(route.src.size).shapes.kv
    memory, state = compiled.memory_analysis(), state_bytes(MODEL, "float32", route.src.size, kv)
    pages = max(route.src_pages, route.dst_pages)
    transit = footprint(state, route.dst, pages=pages, page_size=PAGE).transit
    assert memory.temp_size_in_bytes <= transit
    live = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    larger = max(memory.argument_size_in_bytes, memory.output_size_in_bytes)
    assert live + memory.temp_size_in_bytes - larger <= transit


def layer_collectives(
    roles: str, mesh: int | str, kind: str = "dense", dtype: str = "float32", rows: int = 2
) -> list[Collective]:
    at, bucket, one = programs(mesh, dtype), Bucket(decode=rows, tiles=0, tile=4), layout(roles, mesh)
    lowered = at.lower(StepKey(part=kind, layout=one, bucket=bucket, pages=one.size))
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


@pytest.mark.parametrize("T", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_dcp_layer_exchanges_all_heads_on_every_rank(T):
    """Where dop's ranks receive their own rows of all heads, dcp's receive all rows of all heads: T times Eq. 4."""
    N, rows = 2, [c for c in layer_collectives("dcp", T) if c.kind in ("all-gather", "reduce-scatter")]
    assert sum(c.bytes_received for c in rows) == (T - 1) * N * H * (C + P + C + 1) * 4 // T


def test_cp_inside_a_dop_owner_exchanges_along_its_axis_only():
    """Eq. 4 over the nodes, in every column of chips; the chips of an owner merge their shares of its positions."""
    mesh = MESHES["2x4"]
    found = layer_collectives("node=dop,chip=cp", "2x4")
    n, exchanges = mesh["node"], [c for c in found if c.kind == "all-to-all"]
    assert {c.group_size for c in exchanges} == {n}
    assert n * sum(c.bytes_received for c in exchanges) == dop_exchange(n, 2, 4, 4)
    merges = [(c.group_size, c.result_bytes) for c in found if c.kind == "all-reduce"][:2]
    assert merges == [(mesh["chip"], 2 * H * 4), (mesh["chip"], 2 * H * (C + 1) * 4)]


ROW = D * 4
LAYERS = {
    # Of N rows in the step: every sum of partial results, and nothing else.
    "tp": [("all-reduce", 2 * ROW), ("all-reduce", 2 * ROW)],
    # Rows are gathered for the MLP and its sums scattered; attention is local.
    "dp": [("all-gather", 8 * ROW), ("reduce-scatter", 2 * ROW)],
    # Largest log-sum-exp, then weighted outputs with their weights, then the MLP.
    "cp": [("all-reduce", 2 * H * 4), ("all-reduce", 2 * H * (C + 1) * 4), ("all-reduce", 2 * ROW)],
    # Heads gathered; the merge leaves each rank its share of them; then partial sums of the output, and the MLP.
    "dcp": [
        ("all-gather", 2 * H * (C + P) * 4),
        ("all-reduce", 2 * H * 4),
        ("reduce-scatter", 2 * (H // 4) * (C + 1) * 4),
        ("all-reduce", 2 * ROW),
        ("all-reduce", 2 * ROW),
    ],
    # Every rank computes all of attention; only the MLP's partial sums are exchanged.
    "rep": [("all-reduce", 2 * ROW)],
}


@pytest.mark.parametrize("kind", ["dense", pytest.param("moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", LAYERS)
def test_collectives_of_a_layer(role, kind):
    """Two rows per owner on four ranks. Experts add nothing: routing is replicated."""
    found = layer_collectives(role, 4, kind)
    assert sorted((c.kind, c.result_bytes) for c in found) == sorted(LAYERS[role])


@pytest.mark.parametrize(
    ("src", "dst"),
    [pytest.param(*d, marks=() if d in (("tp", "cp"), ("cp", "dcp")) else pytest.mark.slow) for d in DIRECTIONS],
)
def test_beside_a_layer_a_transfer_adds_its_own_bytes_only(src, dst):
    plan, route = balanced(src, dst, 4)
    bucket = Bucket(decode=2, tiles=0, tile=4)
    both = collective_bytes(programs(4).lower(SwitchKey(route=route, kind="dense", bucket=bucket)).compile())
    layer = LAYERS.get(dst) or [(c.kind, c.result_bytes) for c in layer_collectives(dst, 4)]
    transfer = [c for c in both if "switch.move" in c.scope]
    assert sorted((c.kind, c.result_bytes) for c in both if c not in transfer) == sorted(layer)
    assert sum(c.bytes_received for c in transfer) == plan.bytes_per_rank()[0] // plan.num_layers


ALL_MESHES = [*({"rank": n} for n in (1, 2, 3, 4, 8)), *MESHES.values()]


@st.composite
def engine_plans(draw):
    """Any switch an engine may ask for: requests within its slots and evenly at home, pools that hold them.

    Homes are anew along the axes where owners appear, wherever there is room for one more.
    """
    mesh = draw(st.sampled_from(ALL_MESHES))
    roles = [draw(st.tuples(*(st.sampled_from(sorted(ROLES)) for _ in mesh))) for _ in range(2)]
    src, dst = (make_layout(dict(zip(mesh, names, strict=True)), mesh) for names in roles)
    kv = KVShape(page_size=PAGE, interleave=draw(st.sampled_from([1, 2, PAGE])), bytes_per_token=8)
    slots = draw(st.integers(1, 9))
    room = list(range(src.size)) * math.ceil(slots / src.size)
    homes = draw(st.permutations(room))[:slots]
    kept = [axis for axis in mesh if axis not in free_axes(src, dst)]
    anew, left = [], draw(st.permutations(room))
    for home in homes:
        anew.append(next(rank for rank in left if dst.index(rank, kept) == dst.index(home, kept)))
        left.remove(anew[-1])
    lengths = [draw(st.integers(0, 40)) for _ in range(draw(st.integers(0, len(homes))))]
    old = {f"r{i}": (homes[i], tokens) for i, tokens in enumerate(lengths)}
    new = {f"r{i}": (anew[i], tokens) for i, tokens in enumerate(lengths)}
    need = [max(owner_pages_needed(kv, *at), default=0) for at in ((src, old), (dst, new))]
    pages = [1 + n + draw(st.integers(0, 9)) for n in need]
    pool = PagePool(src, kv, pages[0])
    pool._free = [draw(st.permutations(free)) for free in pool._free]
    for name, (home, tokens) in old.items():
        pool.add(name, home)
        pool.grow(name, tokens)
    state = state_bytes(MODEL, "float32", 1, kv)
    plan = plan_switch(
        pool.manifest(), dst, pages_per_rank=pages[1], state=state, homes={n: h for n, (h, _) in new.items()}
    )
    return plan, Shapes(model=MODEL, dtype="float32", kv=kv, max_model_len=64, slots=slots, penalties=False)


@given(engine_plans())
def test_the_route_that_is_compiled_ahead_carries_every_plan(situation):
    """The rounds of the executor in numpy: what arrives is what `apply` says, however uneven."""
    plan, shapes = situation
    src, dst = plan.before.layout, plan.after.layout
    route = make_route(shapes, src, dst, plan.before.pages_per_rank, plan.after.pages_per_rank, plan.weights)
    assert lacks_room(route, plan.kv) is None
    T, n = src.size, route.sends
    per_page = PAGE // route.grain
    rng = np.random.default_rng(0)
    old = [rng.normal(size=(route.src_pages * per_page, 1)) for _ in range(T)]
    size = route.dst_pages * per_page
    new = [np.concatenate([a[:size], np.zeros((max(0, size - len(a)), 1))]) for a in old]
    still = [axis for axis in src.axis_names if axis not in route.axes]
    source = old
    for maps in make_maps(route, plan.kv):
        taken = [source[r][np.minimum(maps.read[r], len(source[r]) - 1)] for r in range(T)]
        sent = [a[route.locals :] for a in taken]
        for rank in range(T):
            group = [sent[r] for r in range(T) if src.index(r, still) == src.index(rank, still)]
            place = src.index(rank, route.axes)
            mine = group if route.gathers else [a[place * n : (place + 1) * n] for a in group]
            arrived = np.concatenate([taken[rank][: route.locals], *(mine if n else [])])
            real = maps.write[rank] < size
            new[rank] = new[rank].copy()
            new[rank][maps.write[rank][real]] = arrived[real]
        source = new
    for got, want in zip(new, apply(plan, old), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("src", "dst"), [("cp", "dp"), ("dop", "cp")])
def test_large_pools_move_within_the_room_kept_free(src, dst, dtype):
    """Eq. 5 with the route that an engine compiles, where pages outweigh projections as they do on real devices."""
    pages, at = {"dop": 4800, "cp": 4000, "dp": 4000}, programs(4, dtype)
    state = state_bytes(MODEL, dtype, 4, at.shapes.kv)
    here, there = layout(src, 4), layout(dst, 4)
    route = make_route(at.shapes, here, there, pages[src], pages[dst], weight_move(here, there, state))
    memory = at.lower(SwitchKey(route=route)).compile().memory_analysis()
    live = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    more = live + memory.temp_size_in_bytes - max(memory.argument_size_in_bytes, memory.output_size_in_bytes)
    assert more <= footprint(state, there, pages=max(pages[src], pages[dst]), page_size=PAGE).transit
