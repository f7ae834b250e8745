"""Every tuned variant of prefill compiled for its GPU: the instructions it stands on are there, none got fatter."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.chip import CHIPS
from pallas_kernels.compiled import KernelFacts, ptxas_version
from pallas_kernels.gqa_attention import gqa_attention
from pallas_kernels.gqa_attention.tuning import entry_of as gqa_entry
from pallas_kernels.mla_attention import PageTable, mla_attention
from pallas_kernels.mla_prefill import mla_prefill
from pallas_kernels.mla_prefill.tuning import entry_of
from pallas_kernels.tuning import table
from splash_jax.preflight.kernels import compile_kernels

MMA = {"mma.sync", "wgmma.mma_async", "tcgen05.mma"}
TILES = 64


def check(chip: str, entry: dict[str, Any], kernel: KernelFacts) -> None:
    config, evidence = entry["config"], entry["evidence"]
    assert evidence["mma"] in {name for name in MMA if kernel.instructions[name]}
    assert kernel.instructions["cp.async.cg"], "the keys are not pipelined"
    assert kernel.threads == 32 * config["warps"] == evidence["threads"]
    if (evidence["jax"], evidence["ptxas"]) == (jax.__version__, ptxas_version()):
        found = {"registers": kernel.registers, "spill_bytes": kernel.spills, "smem_bytes": kernel.smem}
        assert all(found[key] <= evidence[key] for key in found), (found, evidence)
    resident = CHIPS[chip].blocks_resident(registers=kernel.registers, smem=kernel.smem, threads=kernel.threads)
    assert resident == evidence["blocks_per_sm"]
    assert config.get("workers", resident * CHIPS[chip].sms) == resident * CHIPS[chip].sms


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.mark.parametrize("op", ["mla_prefill", "gqa_attention"])
def test_the_evidence_is_of_the_pinned_compilers(op):
    pinned = (Path(__file__).resolve().parents[2] / "constraints.txt").read_text(encoding="utf-8")
    for entries in table(op).values():
        for evidence in (entry["evidence"] for entry in entries):
            assert f"\njax=={evidence['jax']};" in pinned
            assert f"\nnvidia-cuda-nvcc=={evidence['ptxas']}." in pinned and evidence["spill_bytes"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["plain", "fp8"])
def test_the_absorbed_form_compiles_to_what_the_table_says(chip, rows):
    """DeepSeek-V3's latent rows, 16 heads, tiles of 32 prompt rows."""
    pool = jax.ShapeDtypeStruct((1000, 64, 656 if rows == "fp8" else 576), jnp.uint8 if rows == "fp8" else jnp.bfloat16)
    prefill = partial(mla_prefill, tile=32, value_width=512, backend="triton", chip=chip)
    kernels = compile_kernels(chip, prefill, bf16(TILES * 32, 16, 576), pool, i32(TILES, 128), i32(TILES * 32))
    entry = entry_of(chip, "absorbed", rows, 16, 32)
    check(chip, entry, kernels["mla_prefill"])
    assert bool(kernels["mla_prefill"].instructions["cvt.rn.f16x2.e4m3x2"]) == (rows == "fp8")


@pytest.mark.slow
@pytest.mark.parametrize("tile", [128, 64])
def test_the_expanded_form_compiles_to_what_the_table_says(chip, tile):
    def prefill(q: Any, pool: Any, pages: Any, seen: Any, sequence: Any, w_uk: Any, w_uv: Any) -> Any:
        return mla_prefill(
            q, pool, pages, seen, sequence=sequence, w_uk=w_uk, w_uv=w_uv,
            tile=tile, value_width=512, form="expanded", backend="triton", chip=chip,
        )  # fmt: skip

    kernels = compile_kernels(
        chip, prefill, bf16(8 * tile, 16, 192), bf16(1000, 64, 576), i32(2, 128), i32(8 * tile), i32(8),
        bf16(16, 512, 128), bf16(16, 128, 512),
    )  # fmt: skip
    entry, kernel = entry_of(chip, "expanded", "plain", 16, tile), kernels["mla_prefill_expanded"]
    check(chip, entry, kernel)
    assert kernel.spills == 0 and kernel.grid == (max(1, tile // entry["config"]["block_rows"]), 16, 8)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [1, 16])
@pytest.mark.parametrize("width", [64, 128])
def test_shared_key_heads_compile_to_what_the_table_says(chip, width, tile):
    """Groups of eight: one decode row fills half a block of 16 lines, 16 prompt rows one of 128."""
    attend = partial(gqa_attention, tile=tile, backend="triton", chip=chip)
    pool = bf16(1000, 64, 2, width)
    kernels = compile_kernels(
        chip, attend, bf16(TILES * tile, 16, width), pool, pool, i32(TILES, 128), i32(TILES * tile)
    )
    check(chip, gqa_entry(chip, width, tile * 8), kernels["gqa_attention"])
    assert kernels["gqa_attention"].spills == 0
    if tile == 1:
        assert kernels["gqa_attention_merge"].spills == 0, "64 rows are split over their keys"


@pytest.mark.slow
def test_tiles_of_the_engine_take_the_kernel(chip):
    """Through `mla_attention`, as the engine calls it: 8 decode rows and two tiles of 16 prompt rows."""
    table = PageTable(i32(10, 16), i32(10), i32(10))
    attend = partial(mla_attention, value_width=512, tile=16, shares=1, interleave=64, backend="gpu", chip=chip)
    kernels = compile_kernels(chip, attend, bf16(8 + 32, 16, 576), i32(8 + 32), bf16(1000, 64, 576), table)
    assert {"mla_decode_items", "mla_prefill", "mla_decode_merge"} <= set(kernels)
