"""Eq. 10 over Table 2's loads: by hand, as laws over every layout, and against how the engine pads."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash_jax.cost import RESOURCES, Load, ServedModel, StepModel, estimate_step, load_hardware
from splash_jax.cost.work import LOADS
from splash_jax.errors import ConfigError, RequestError
from splash_jax.layouts import ROLES, make_layout
from splash_jax.models.config import ModelConfig
from splash_jax.ownership import Bucket
from splash_jax.preflight.case import read_model
from tests.support import SMALL

H200 = load_hardware("h200")
LAYOUTS = [make_layout(role, {"rank": 8}) for role in ROLES]
HYBRIDS = [make_layout(f"node={a},chip={b}", {"node": 2, "chip": 4}) for a, b in product(ROLES, repeat=2)]
MODEL = ServedModel(
    sizes=ModelConfig.from_dict(SMALL, "small"), weight_bytes=4, activation_bytes=4, kv_bytes_per_token=160
)
DENSE = replace(
    MODEL,
    sizes=ModelConfig.from_dict(
        SMALL | {"num_hidden_layers": 1, "first_k_dense_replace": 1, "n_routed_experts": 0}, "d"
    ),
)


@st.composite
def loads(draw):
    batch = draw(st.integers(1, 40))
    numbers = lambda lo, hi: np.array(draw(st.lists(st.integers(lo, hi), min_size=batch, max_size=batch)))  # noqa: E731
    rows = numbers(1, 300)
    return Load(rows + numbers(0, 100_000), rows, numbers(0, 7))


@given(loads(), st.sampled_from((LAYOUTS, HYBRIDS)))
def test_every_estimate_lies_between_its_floor_and_its_ceiling(load, layouts):
    hardware = replace(H200, step_overhead_s=1e-4)
    for estimate in StepModel(MODEL, layouts, hardware).seconds(load).values():
        assert tuple(estimate.terms) == RESOURCES and min(estimate.terms.values()) >= 0
        assert estimate.floor == max(estimate.terms.values()) == estimate.terms[estimate.bound]
        assert estimate.ceiling == pytest.approx(sum(estimate.terms.values()))
        assert estimate.floor <= estimate.seconds * (1 + 1e-12) and estimate.seconds <= estimate.ceiling * (1 + 1e-12)


@given(loads())
def test_many_layouts_at_once_are_each_alone(load):
    together = StepModel(MODEL, LAYOUTS, H200).seconds(load)
    for layout, found in together.items():
        assert estimate_step(MODEL, layout, load, H200).seconds == pytest.approx(found.seconds, rel=1e-12)


def test_one_dense_layer_by_hand():
    """Two owners of two ranks, three requests of which two share an owner: dp's busiest rank has two of them."""
    m, dp = DENSE.sizes, make_layout("dp", {"rank": 2})
    found = estimate_step(DENSE, dp, Load(np.array([10, 20, 30]), np.array([1, 1, 1]), np.array([0, 1, 0])), H200)
    d, H, r, c, n, p, v = 64, 8, 24, 32, 16, 8, 16
    projections = d * (r + c + p) + H * (r * (n + p) + c * (n + v) + v * d)
    mlp, head = 3 * d * m.intermediate_size / 2, d * m.vocab_size / 2
    flops = 2 * 2 * projections + 40 * H * 2 * (2 * c + p) + 2 * 4 * mlp + 2 * 4 * head
    assert found.terms["flops"] == pytest.approx(flops / H200.bf16_flops_per_s)
    assert found.terms["hbm"] == pytest.approx((4 * (projections + mlp + head) + 40 * 160) / H200.hbm_bytes_per_s)
    # The other owner's two rows: gathered and summed for the MLP, summed in the embedding, gathered for the head. Then
    # half of the logits of four rows, and their tokens.
    row = d * 4
    received = 4 * 2 * row + 4 * m.vocab_size * 4 / 2 / 2 + 4 * 8 / 2
    assert found.terms["network"] == pytest.approx(received / H200.interconnect_bytes_per_s)
    assert found.terms["messages"] == pytest.approx(6 * H200.message_latency_s)


@pytest.mark.parametrize(
    ("role", "weights", "read", "work"),
    [
        ("tp", 1 / 8, 12, 12 / 8),
        ("cp", 1, 12 / 8, 12 / 8),
        ("dp", 1, math.ceil(12 / 8), math.ceil(12 / 8)),
        ("dop", 1 / 8, math.ceil(12 / 8), math.ceil(12 / 8)),
    ],
)
def test_loads_of_table_2(role, weights, read, work):
    """12 equal requests on 8 ranks: projection weights, histories read and attention work of the busiest rank."""
    layout, s = make_layout(role, {"rank": 8}), 1000
    steps = StepModel(MODEL, [layout], H200)
    stages = {stage.name: stage for _, stage in steps._stages[0]}
    F = dict(zip(LOADS, steps._loads(Load.balanced(12, s, 8))[0], strict=True))
    placed = stages["projections"].work(F).hbm_bytes / 4 - MODEL.whole_projection_weights
    assert placed == pytest.approx(MODEL.placed_projection_weights * weights)
    assert stages["kernel"].work(F).hbm_bytes == pytest.approx(160 * s * read)
    one_request = s * 8 * 2 * (MODEL.query_width + MODEL.value_width)
    assert stages["kernel"].work(F).flops == pytest.approx(one_request * work)


def test_uneven_owners_cost_what_the_busiest_has():
    even, uneven = Load.balanced(8, 50_000, 8), Load(np.full(8, 50_000), np.ones(8, int), np.zeros(8, int))
    found = [StepModel(MODEL, LAYOUTS, H200).seconds(load) for load in (even, uneven)]
    slower = {str(layout): found[1][layout].seconds / found[0][layout].seconds for layout in LAYOUTS}
    assert slower["tp"] == slower["cp"] == slower["rep"] == slower["dcp"] == 1
    assert min(slower["dp"], slower["dop"]) > 1.2


def test_a_chunk_sees_what_came_before_it():
    """A prompt in chunks has as many query-key pairs as in one piece, decode as many as it has context."""
    whole = Load(np.array([1000]), np.array([1000]), np.array([0])).pairs()[0]
    chunks = [Load(np.array([end]), np.array([250]), np.array([0])).pairs()[0] for end in (250, 500, 750, 1000)]
    assert whole == sum(chunks) == 1000 * 1001 / 2
    assert Load.decode([7, 9], 2).pairs().tolist() == [7, 9]


def test_a_mixed_step_costs_more_than_either_part_and_less_than_both():
    steps = StepModel(MODEL, LAYOUTS, H200)
    decode, chunk = Load.balanced(16, 4096, 8), Load(np.array([2048]), np.array([512]), np.array([0]))
    names = ("context", "new_rows", "home")
    mixed = Load(*(np.concatenate([getattr(decode, name), getattr(chunk, name)]) for name in names))
    parts = [steps.seconds(load) for load in (decode, chunk, mixed)]
    for layout in LAYOUTS:
        a, b, both = (part[layout].seconds for part in parts)
        assert max(a, b) <= both <= (a + b) * 1.05  # owners' rows are padded to the fullest: never far above


def test_buckets_pad_as_the_engine_does():
    dop = make_layout("dop", {"rank": 8})
    buckets = [Bucket(decode=decode, tiles=tiles, tile=64) for decode, tiles in ((1, 0), (4, 0), (4, 3))]
    steps = StepModel(MODEL, [dop], H200, {dop: buckets})
    rows = lambda *requests: steps._loads(Load(*map(np.array, zip(*requests, strict=True))))[0, 1:3].tolist()  # noqa: E731
    assert rows((9, 1, 0), (9, 1, 1)) == [1, 1]
    assert rows((9, 1, 0), (9, 1, 0)) == [4, 4]
    assert rows((9, 1, 0), (80, 65, 0)) == [4 + 3 * 64, 7]
    assert steps._loads(Load.balanced(8, 9, 8))[0, 3] == 8  # experts leave padding out


def test_ranks_of_one_device_add_up():
    """On a shared device work is summed: splitting the projections pays, and uneven owners cost no more."""
    shared = replace(H200, ranks_share_device=True)
    one = StepModel(MODEL, LAYOUTS, shared).seconds(Load(np.full(8, 90_000), np.ones(8, int), np.arange(8)))
    piled = StepModel(MODEL, LAYOUTS, shared).seconds(Load(np.full(8, 90_000), np.ones(8, int), np.zeros(8, int)))
    single = StepModel(MODEL, LAYOUTS, H200).seconds(Load(np.full(8, 90_000), np.ones(8, int), np.arange(8)))
    for layout in LAYOUTS:
        attention = {"tp": 1, "rep": 1}.get(str(layout), 0)  # every rank has every history
        assert one[layout].terms["hbm"] == pytest.approx(8 * single[layout].terms["hbm"])
        assert attention == 0 or one[layout].terms == piled[layout].terms
    kernel = lambda found, role: found[LAYOUTS[list(ROLES).index(role)]].terms["hbm"]  # noqa: E731
    assert kernel(piled, "dop") == pytest.approx(kernel(one, "dop"))


def test_layers_compute_what_a_step_does_without_exchanges_and_ends():
    steps, load = StepModel(MODEL, LAYOUTS, H200), Load.balanced(16, 4096, 8)
    layers = steps.layer_seconds(load)
    assert layers.shape == (6, 3)
    for one, (layout, estimate) in zip(layers, steps.seconds(load).items(), strict=True):
        assert one[1] == one[2] != one[0], layout  # one dense layer, two of experts
        head = estimate_step(MODEL, layout, load, replace(H200, hbm_bytes_per_s=math.inf, bf16_flops_per_s=math.inf))
        assert one.sum() < estimate.seconds - head.seconds + 1e-12


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (([1, 2], [1], [0, 0]), r"three arrays of integers of one length; got int64\[2\], int64\[1\], int64\[2\]"),
        (([1.5], [1], [0]), "of integers of one length; got float64"),
        (([5], [6], [0]), "request 0 of a load has 6 new rows and a context of 5 tokens, which counts them too"),
        (([5], [1], [-1]), "home -1 or new_rows 1 of a load is negative"),
    ],
)
def test_a_load_that_contradicts_itself_is_refused(arrays, words):
    with pytest.raises(RequestError, match=words):
        Load(*map(np.array, arrays))


def test_what_no_rank_or_mesh_has_is_refused():
    with pytest.raises(RequestError, match="at home on rank 8, and the ranks are 0 to 7"):
        StepModel(MODEL, LAYOUTS, H200).seconds(Load(np.array([5]), np.array([1]), np.array([8])))
    with pytest.raises(ValueError, match=r"layouts \['tp', 'node=tp,chip=tp'\] are not of one mesh"):
        StepModel(MODEL, [LAYOUTS[0], HYBRIDS[0]], H200)
    with pytest.raises(ConfigError, match="weight_bytes must be above 0, got 0"):
        replace(MODEL, weight_bytes=0)
    with pytest.raises(ConfigError, match="dtype must be auto or one of float32, bfloat16, float8, got 'int4'"):
        ServedModel.of(MODEL.sizes, "int4")


def test_a_model_is_served_in_a_dtype():
    assert ServedModel.of(MODEL.sizes, "float32") == MODEL
    v3 = read_model("deepseek-v3.2")
    widths = {dtype: ServedModel.of(v3, dtype) for dtype in ("bfloat16", "float8")}
    assert {k: (m.weight_bytes, m.activation_bytes, m.kv_bytes_per_token) for k, m in widths.items()} == {
        "bfloat16": (2, 2, 1152),
        "float8": (1, 2, 656),
    }
    assert widths["float8"].placed_projection_weights == 164 * 2**20  # Q-B, KV-B and O of Eq. 9
