"""Collectives as read from HLO text: every form that a compiler prints."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from splash_jax.layouts import attention_mesh
from splash_jax.runtime.collectives import RECEIVED, Collective, collective_bytes

HEADER = "HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[2]{0})->f32[2]{0}}, num_partitions=8\n"


def one(line: str) -> tuple[str, int, int, int]:
    (found,) = collective_bytes(HEADER + line)
    return found.kind, found.result_bytes, found.group_size, found.bytes_received


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(
            "  %ag.3 = f32[8,4,40]{2,1,0} all-gather(%x), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}",
            ("all-gather", 5120, 4, 3840),
            id="all-gather",
        ),
        pytest.param(
            "  ROOT %ag = bf16[8,4]{1,0:T(8,128)(2,1)S(1)} all-gather(bf16[2,4]{1,0} %x), replica_groups=[2,4]<=[8]",
            ("all-gather", 64, 4, 48),
            id="iota groups, tiled layout, typed operand, root",
        ),
        pytest.param(
            "  %a2a = (f32[2,4]{1,0}, f32[2,4]{1,0}, /*index=2*/f32[2,4]{1,0}, f32[2,4]{1,0}) all-to-all(%a, %b, %c, "
            "%d), replica_groups={{0,1,2,3},{4,5,6,7}}",
            ("all-to-all", 128, 4, 96),
            id="tuple all-to-all",
        ),
        pytest.param(
            "  a2a = s8[16]{0} all-to-all(x), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}",
            ("all-to-all", 16, 2, 8),
            id="names without a percent sign, transposed iota",
        ),
        pytest.param(
            "  %ar = (f32[2,64]{1,0}, bf16[6]{0}) all-reduce(%x, %y), replica_groups={{0,1}}, to_apply=%add",
            ("all-reduce", 524, 2, 524),
            id="combined all-reduce",
        ),
        pytest.param(
            "  %rs = f32[1,2,64]{2,1,0} reduce-scatter(%x), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add",
            ("reduce-scatter", 512, 4, 1536),
            id="reduce-scatter",
        ),
        pytest.param(
            "  %cp = f8e4m3fn[3,5]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}",
            ("collective-permute", 15, 8, 15),
            id="collective-permute",
        ),
        pytest.param(
            "  %ag = pred[16]{0} all-gather(%x), replica_groups={}, dimensions={0}",
            ("all-gather", 16, 8, 14),
            id="no groups: every rank",
        ),
        pytest.param(
            "  %ag = s4[9]{0} all-gather(%x), replica_groups={{0},{1}}, dimensions={0}",
            ("all-gather", 5, 1, 0),
            id="four bits, alone",
        ),
        pytest.param(
            "  %r = f32[<=16]{0} ragged-all-to-all(%a, %b, %c, %d, %e, %f), replica_groups={{0,1,2,3}}",
            ("ragged-all-to-all", 64, 4, 64),
            id="ragged",
        ),
    ],
)
def test_one_line(line, expected):
    assert one(line) == expected


@pytest.mark.parametrize(
    ("start", "done", "expected"),
    [
        (
            "%s = (f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}",
            "%d = f32[8,4]{1,0} all-gather-done(%s)",
            ("all-gather", 128, 4, 96),
        ),
        (
            "%s = ((f32[2], f32[4]), (f32[8], f32[16])) all-gather-start(%x, %y), replica_groups=[1,4]<=[4]",
            "%d = (f32[8]{0}, f32[16]{0}) all-gather-done(%s)",
            ("all-gather", 96, 4, 72),
        ),
        (
            "%s = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add",
            "%d = f32[8]{0} all-reduce-done(f32[8]{0} %s)",
            ("all-reduce", 32, 2, 32),
        ),
        (
            "%s = ((f32[8]{0}), f32[8]{0}, u32[], u32[]) all-to-all-start(%x), replica_groups={{0,1,2,3}}",
            "%d = f32[8]{0} all-to-all-done(((f32[8]{0}), f32[8]{0}, u32[], u32[]) %s)",
            ("all-to-all", 32, 4, 24),
        ),
        (
            "%s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}",
            "%d = f32[8]{0} collective-permute-done(%s)",
            ("collective-permute", 32, 8, 32),
        ),
    ],
)
def test_an_asynchronous_pair_counts_once(start, done, expected):
    assert one(f"  {start}\n  %between = f32[] add(%p, %q)\n  ROOT {done}") == expected


def test_other_lines_do_not_count():
    text = HEADER + "\n".join(
        [
            "%wrapped (p: f32[2]) -> f32[8] {",
            "  %p = f32[2]{0} parameter(0)",
            '  %x = f32[2]{0} add(%p, %p), metadata={op_name="jit(f)/all-gather(x)"}',
            "  %g = f32[2]{0} get-tuple-element(%all-to-all), index=0",
            "}",
        ]
    )
    assert collective_bytes(text) == []


def test_a_generic_async_wrapper_is_counted_where_the_collective_is():
    text = HEADER + (
        "%wrapped (p: f32[8]) -> f32[8] {\n  ROOT %a = f32[8]{0} all-to-all(%p), replica_groups={{0,1}}\n}\n"
        "ENTRY %main {\n  %s = ((f32[8]), f32[8], u32[]) async-start(%x), calls=%wrapped\n"
        "  ROOT %d = f32[8]{0} async-done(%s)\n}"
    )
    assert collective_bytes(text) == [Collective(kind="all-to-all", result_bytes=32, group_size=2)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("  %d = f32[8]{0} all-gather-done(%gone)", "no line before d starts what it ends: %d = .*gone"),
        ("  %d = opaque[8]{0} all-gather(%x), replica_groups={{0,1}}", "element type 'opaque' has no known width"),
    ],
)
def test_what_cannot_be_counted_is_refused(line, words):
    with pytest.raises(ValueError, match=words):
        collective_bytes(HEADER + line)


def test_compiled_programs():
    """Each primitive on a mesh of 2 x 4, over its second axis, with the bytes that its arrays say."""
    mesh = attention_mesh({"a": 2, "b": 4})

    def f(x):
        with jax.named_scope("here"):
            gathered = jax.lax.all_gather(x, "b", axis=0, tiled=True)
        swapped = jax.lax.all_to_all(gathered, "b", split_axis=0, concat_axis=1, tiled=True)
        scattered = jax.lax.psum_scatter(gathered, "b", scatter_dimension=0, tiled=True)
        moved = jax.lax.ppermute(x, "b", [(i, (i + 1) % 4) for i in range(4)])
        return swapped.sum() + scattered.sum() + moved.sum() + jax.lax.psum(jnp.sin(x), "a").sum()

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(), check_vma=False)
    compiled = jax.jit(mapped).lower(jax.ShapeDtypeStruct((32, 8), jnp.float32)).compile()
    found = {c.kind: c for c in collective_bytes(compiled)}
    x = 4 * 8 * 4  # bytes of a rank's part
    assert found["all-gather"].bytes_received == 3 * x and "here" in found["all-gather"].scope
    assert found["all-to-all"].bytes_received == 3 * x
    assert found["reduce-scatter"].bytes_received == 3 * x
    assert found["collective-permute"].bytes_received == x
    assert found["all-reduce"].bytes_received == x  # 2 x (1 - 1/2)
    assert {kind: c.group_size for kind, c in found.items() if kind in ("all-gather", "all-reduce")} == {
        "all-gather": 4,
        "all-reduce": 2,
    }
    assert set(found) <= set(RECEIVED)
