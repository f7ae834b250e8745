"""Bytes per rank: Eq. 1, the pages a budget leaves, and the paper's counts for whole models (Eq. 9)."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash_jax.engine.build import state_bytes
from splash_jax.errors import ConfigError
from splash_jax.layouts import ROLES, make_layout
from splash_jax.models.config import ModelConfig
from splash_jax.models.deepseek_v3_weights import model_leaves
from splash_jax.models.load import leaf_bytes
from splash_jax.ownership import KVShape, StateBytes, footprint, pages_that_fit
from splash_jax.ownership.footprint import IN_TRANSIT, kv_bytes, projection_bytes
from splash_jax.ownership.plan import weight_move
from splash_jax.runtime import Shapes
from splash_jax.runtime.signatures import host_state
from splash_jax.runtime.sizes import sampler_bytes
from tests.support import MESHES, SMALL

MIB = 2**20
STATE = StateBytes(projections=8 * 840, common=1000, kv_per_token=10, num_layers=3)

DEEPSEEK_V3 = SMALL | {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_hidden_layers": 61,
}
GLM5 = DEEPSEEK_V3 | {
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "num_hidden_layers": 78,
}


def layouts(size: int):
    return {role: make_layout(role, {"rank": size}) for role in ROLES}


@pytest.mark.parametrize("T", [1, 2, 4, 8])
def test_footprints_of_eq_1(T):
    """Projections W or W / T; history B s k on every rank where all hold it, 1/T of it elsewhere."""
    W, Bks = STATE.projections * STATE.num_layers, 16 * 64 * STATE.kv_per_token * STATE.num_layers
    got = {
        role: (projection_bytes(STATE, layout), kv_bytes(STATE, layout, [64] * 16))
        for role, layout in layouts(T).items()
    }
    assert got == {
        "tp": (W // T, Bks),
        "dp": (W, Bks // T),
        "cp": (W, Bks // T),
        "dop": (W // T, Bks // T),
        "dcp": (W // T, Bks // T),
        "rep": (W, Bks),
    }


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("roles", list(itertools.product(ROLES, repeat=2)), ids="-".join)
def test_footprints_of_two_axes_multiply(roles, mesh):
    """Eq. 1 axis by axis: each divides the projections, the history, both or neither."""
    layout = make_layout(dict(zip(mesh, roles, strict=True)), mesh)
    W, Bks = STATE.projections * STATE.num_layers, 16 * 64 * STATE.kv_per_token * STATE.num_layers
    split = math.prod(n for role, n in zip(roles, mesh.values(), strict=True) if role in ("tp", "dop", "dcp"))
    apart = math.prod(n for role, n in zip(roles, mesh.values(), strict=True) if role not in ("tp", "rep"))
    assert projection_bytes(STATE, layout) == W // split
    assert kv_bytes(STATE, layout, [64] * 16) == Bks // apart


@given(
    st.integers(1, 8),
    st.sampled_from(sorted(ROLES)),
    st.integers(1, 16),
    st.integers(0, 5000),
    st.integers(0, 100_000),
)
def test_a_budget_is_filled_and_never_exceeded(T, role, page_size, reserve, spare):
    layout = layouts(T)[role]
    least = footprint(STATE, layout, pages=1, page_size=page_size).total + reserve
    budget = least + spare
    pages = pages_that_fit(STATE, layout, page_size=page_size, budget=budget, reserve=reserve)
    assert footprint(STATE, layout, pages=pages, page_size=page_size).total + reserve <= budget
    assert footprint(STATE, layout, pages=pages + 1, page_size=page_size).total + reserve > budget
    with pytest.raises(ConfigError, match=rf"layout {role} does not fit: {least - 1} bytes per rank lack 1 bytes"):
        pages_that_fit(STATE, layout, page_size=page_size, budget=least - 1, reserve=reserve)


def test_large_sizes_are_told_in_gib():
    state = replace(STATE, common=5 * 2**30)
    with pytest.raises(ConfigError, match=r"fit: 4\.00 GiB per rank lack 1\.00 GiB for .* beside 5\.00 GiB of weights"):
        pages_that_fit(state, layouts(4)["tp"], page_size=1, budget=4 * 2**30, reserve=0)


def test_a_footprint_leaves_room_for_one_layer_on_the_move():
    """Eq. 5: the larger of two layouts, with one layer's whole projections and pages beside it, is within the total."""
    found = footprint(STATE, layouts(4)["dop"], pages=7, page_size=4)
    assert found.transit == STATE.projections + IN_TRANSIT * 7 * 4 * STATE.kv_per_token
    assert found.total == found.common + found.projections + found.kv + found.transit
    assert (found.common, found.kv, found.pages) == (1000, 7 * 4 * 10 * 3, 7)


def test_split_projections_leave_more_pages():
    """The point of dop: at one budget it holds more distinct tokens than any other layout."""
    budget = 4 * STATE.projections * STATE.num_layers
    pages = {
        role: pages_that_fit(STATE, layout, page_size=4, budget=budget, reserve=0)
        for role, layout in layouts(4).items()
    }
    assert pages["dop"] == pages["tp"] == pages["dcp"] > pages["dp"] == pages["cp"] == pages["rep"]


def test_deepseek_v3_in_bf16():
    """Q-B 72, KV-B 32, O 224 MiB; 287 MiB received per rank and layer at T = 8, 2,296 MiB over the group."""
    model = ModelConfig.from_dict(DEEPSEEK_V3, "DeepSeek-V3")
    kv = KVShape(page_size=64, interleave=64, bytes_per_token=(512 + 64) * 2)
    state = state_bytes(model, "bfloat16", 8, kv)
    parts = {n: leaf_bytes(leaf, "bfloat16") / MIB for n, leaf in model_leaves(model, 8)["layers"][0]["moved"].items()}
    assert parts == {"q_b": 72, "w_uk": 16, "w_uv": 16, "o": 224}
    assert state.projections == 328 * MIB
    move = weight_move(layouts(8)["dop"], layouts(8)["cp"], state)
    assert move.bytes_per_rank == 287 * MIB and 8 * move.bytes_per_rank == 2296 * MIB
    assert (state.num_layers, state.kv_per_token) == (61, 1152)


@pytest.mark.parametrize(
    ("config", "layer", "received"), [(DEEPSEEK_V3, 164.0, 143.5), (GLM5, 142.0, 124.25)], ids=["v3", "glm5"]
)
def test_projections_in_fp8(config, layer, received):
    model = ModelConfig.from_dict(config, "model")
    leaves = model_leaves(model, 8)["layers"][0]["moved"].values()
    total = sum(leaf_bytes(leaf, "float8_e4m3fn") for leaf in leaves)
    state = StateBytes(projections=total, common=0, kv_per_token=1, num_layers=model.num_layers)
    move = weight_move(layouts(8)["tp"], layouts(8)["dp"], state)
    assert (total / MIB, move.bytes_per_rank / MIB) == (layer, received)
    if config is GLM5:
        assert move.bytes_per_rank * 78 / 2**30 == pytest.approx(9.46, abs=0.005)


def test_common_bytes_count_what_no_switch_moves():
    """Everything of the small fixture is counted once: cut weights by their share, the moved ones apart."""
    model = ModelConfig.from_dict(SMALL, "small")
    kv = KVShape(page_size=4, interleave=4, bytes_per_token=160)
    alone, four = (state_bytes(model, "float32", ranks, kv) for ranks in (1, 4))
    d, H = 64, 8
    moved = 4 * (24 * H * 24 + H * 16 * 32 + H * 32 * 16 + H * 16 * d)
    assert alone.projections == four.projections == moved
    experts = 2 * 16 * (d * 48 + 24 * d) + 2 * (d * 48 + 24 * d) + d * 192 + 96 * d
    vocabulary = 2 * 512 * d
    whole = 3 * (2 * d + d * 40 + 32 + d * 24 + 24) + d + 2 * (d * 16 + 16)
    assert alone.common == 4 * (experts + vocabulary + whole)
    assert four.common == 4 * ((experts + vocabulary) // 4 + whole)


def test_what_the_sampler_remembers_is_counted():
    model = ModelConfig.from_dict(SMALL, "small")
    kv = KVShape(page_size=4, interleave=4, bytes_per_token=160)
    with_counts, without = (
        Shapes(model=model, dtype="float32", kv=kv, max_model_len=64, slots=8, penalties=penalties)
        for penalties in (True, False)
    )
    for shapes in (with_counts, without):
        assert sampler_bytes(shapes) == sum(x.nbytes for x in host_state(shapes))
    assert sampler_bytes(with_counts) == 4 * (8 + 8 * 512)
