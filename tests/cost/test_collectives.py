"""The collectives that the cost model counts are those that a layer's program asks for, to the byte."""

from itertools import product

import pytest

from splash_jax.cost import ServedModel
from splash_jax.cost.collectives import attention_messages, carries_own_rows, feed_forward_messages, head_messages
from splash_jax.layouts import ROLES, attention_mesh, make_layout
from splash_jax.ownership import Bucket, KVShape
from splash_jax.preflight.case import read_model
from splash_jax.runtime import Programs, Shapes, StepKey
from splash_jax.runtime.collectives import collective_bytes
from tests.support import HYBRIDS, MESHES

ROWS = 2
ONE = {"rank": 4}
EVERY_PAIR = [
    pytest.param(f"node={a},chip={b}", MESHES["2x4"], marks=() if f"node={a},chip={b}" in HYBRIDS else pytest.mark.slow)
    for a, b in product(ROLES, ROLES)
]


def asked_for(
    small: ServedModel, part: str, roles: str, mesh: dict[str, int], rows: int = ROWS
) -> list[tuple[str, int, int]]:
    """Kind, group and bytes received of a program's collectives, sorted."""
    layout = make_layout(roles, mesh)
    kv = KVShape(page_size=4, interleave=4, bytes_per_token=160)
    shapes = Shapes(model=small.sizes, dtype="float32", kv=kv, max_model_len=64, slots=8, penalties=False)
    bucket = Bucket(decode=rows, tiles=0, tile=4)
    lowered = Programs(attention_mesh(mesh), shapes).lower(StepKey(part=part, layout=layout, bucket=bucket, pages=8))
    found = collective_bytes(lowered.compiler_ir("hlo").as_hlo_text())
    return sorted((c.kind, c.group_size, c.bytes_received) for c in found)


@pytest.mark.parametrize(("roles", "mesh"), [*((role, ONE) for role in ROLES), *EVERY_PAIR])
def test_a_layer_asks_for_what_is_counted(small, roles, mesh):
    layout = make_layout(roles, mesh)
    messages = [*attention_messages(small, layout), *feed_forward_messages(small, layout)]
    counted = sorted((m.kind, m.group_size, round(m.received * ROWS)) for m in messages)
    assert asked_for(small, "dense", roles, mesh) == counted


@pytest.mark.parametrize("role", ROLES)
def test_a_head_asks_for_what_is_counted(small, role):
    """Of four drawn rows per owner on four ranks: nothing is padded."""
    counted = sorted(
        (m.kind, m.group_size, round(m.received * 4)) for m in head_messages(small, make_layout(role, ONE))
    )
    assert asked_for(small, "head", role, ONE, rows=4) == counted


@pytest.mark.parametrize("role", ROLES)
def test_who_carries_only_own_rows_is_what_roles_say(role):
    (axis,) = make_layout(role, ONE).axes
    assert carries_own_rows(axis) == ROLES[role].shards_rows


def test_eq_4_counts_two_of_the_three_exchanges_of_dop():
    """Aggregate bytes per query row and layer at T = 8: 121,856 for GLM-5 dims in BF16, 243,712 for DeepSeek-V3."""
    for name, expected in (("glm-5.3", 121_856), ("deepseek-v3.2", 243_712)):
        model = ServedModel(sizes=read_model(name), weight_bytes=2, activation_bytes=2, kv_bytes_per_token=1152)
        messages = attention_messages(model, make_layout("dop", {"rank": 8}))
        exchanges = [m.received for m in messages if m.kind == "all-to-all"]
        # Received by each of 8 ranks for a row of each of 8 owners: per row of one owner, in aggregate.
        assert len(exchanges) == 2 and sum(exchanges) == expected
        output = next(m for m in messages if m.kind == "all-reduce")
        assert output.received == 2 * 7 / 8 * 8 * model.sizes.hidden_size * 2  # which Eq. 4 leaves out
