"""Every tuned variant compiled for its GPU: the instructions it stands on are there, and it got no fatter."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.chip import CHIPS
from pallas_kernels.compiled import ptxas_version
from pallas_kernels.mla_attention import PageTable, mla_attention
from pallas_kernels.mla_decode import BlackwellConfig, HopperConfig, mla_decode
from pallas_kernels.tuning import entry_for, table
from splash_jax.preflight.kernels import compile_kernels

MMA = {"mma.sync", "wgmma.mma_async", "tcgen05.mma"}


def variant(
    chip: str, rows: str, heads: int, backend: str = "triton", page: int = 64
) -> tuple[dict[str, Any], dict[str, Any]]:
    """DeepSeek-V3's latent rows, pages of 64: the table's entry, and the kernels made of it."""
    pool = jax.ShapeDtypeStruct(
        (1000, page, 656 if rows == "fp8" else 576), jnp.uint8 if rows == "fp8" else jnp.bfloat16
    )
    q = jax.ShapeDtypeStruct((8, heads, 576), jnp.bfloat16)
    pages, held = jax.ShapeDtypeStruct((8, 128), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    decode = partial(mla_decode, value_width=512, backend=backend, chip=chip)
    return entry_for("mla_decode", chip, backend, rows, heads), compile_kernels(chip, decode, q, pool, pages, held)


def same_compilers(evidence: dict[str, Any]) -> bool:
    """Registers and spills are one pair of compilers' own; instructions and residency must hold with any."""
    return (evidence["jax"], evidence["ptxas"]) == (jax.__version__, ptxas_version())


@pytest.mark.parametrize("op", ["mla_decode", "sparse_mla", "indexer_topk"])
def test_the_evidence_is_of_the_pinned_compilers(op):
    pinned = (Path(__file__).resolve().parents[2] / "constraints.txt").read_text(encoding="utf-8")
    for entries in table(op).values():
        for evidence in (entry["evidence"] for entry in entries):
            assert f"\njax=={evidence['jax']};" in pinned, "scripts/tune_kernels.py --keep --write compiles it anew"
            assert f"\nnvidia-cuda-nvcc=={evidence['ptxas']}." in pinned, "scripts/tune_kernels.py, likewise"


@pytest.mark.parametrize(
    ("rows", "heads"),
    [
        ("fp8", 16),
        *(pytest.param("plain", heads, marks=pytest.mark.slow) for heads in (16, 32, 64, 128)),
        *(pytest.param("fp8", heads, marks=pytest.mark.slow) for heads in (32, 64, 128)),
    ],
)
def test_a_variant_compiles_to_what_the_table_says(chip, rows, heads):
    entry, kernels = variant(chip, rows, heads)
    config, evidence, kernel = entry["config"], entry["evidence"], kernels["mla_decode_items"]
    assert {name for name in MMA if kernel.instructions[name]} == {evidence["mma"]}
    assert kernel.instructions["cp.async.cg"], "the gather is not pipelined"
    assert bool(kernel.instructions["cvt.rn.f16x2.e4m3x2"]) == (rows == "fp8")
    assert kernel.threads == 32 * config["warps"]
    if same_compilers(evidence):
        found = {"registers": kernel.registers, "spill_bytes": kernel.spills, "smem_bytes": kernel.smem}
        assert all(found[key] <= evidence[key] for key in found), (found, evidence)
    resident = CHIPS[chip].blocks_resident(registers=kernel.registers, smem=kernel.smem, threads=kernel.threads)
    assert resident == evidence["blocks_per_sm"]
    blocks = max(1, heads // config["block_heads"])
    assert config["workers"] == resident * CHIPS[chip].sms // blocks
    merge = kernels["mla_decode_merge"]
    assert merge.spills == 0 and merge.grid == (heads, 8, 1)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("rows", ["plain", "fp8"])
def test_the_hopper_kernel_stands_on_wgmma_and_tma(compiler, rows, heads):
    entry, kernels = variant("h200", rows, heads, "hopper")
    fp8 = rows == "fp8"
    kernel = kernels["mla_decode_hopper_fp8" if fp8 else "mla_decode_hopper"]
    evidence, config = entry["evidence"], HopperConfig(**entry["config"])
    assert kernel.instructions["wgmma.mma_async"] == 576 // 16 + 2 * 64 // 16, (
        "logits by 16 columns, values by 16 tokens in the leader and in the follower"
    )
    assert kernel.instructions["cp.async.bulk.tensor"] and kernel.instructions["setmaxnreg"] == 3
    assert kernel.instructions["cvt.rn.f16x2.e4m3x2"] == (64 * 512 // 128 // 2 if fp8 else 0), "two a thread at a time"
    # Between a store to shared memory and wgmma or TMA that reads it: of probabilities and factors, of the log-sum-exp,
    # of zeros and of FP8 rows. The race test sees all but the one before FP8's zeros, within one warpgroup.
    assert kernel.instructions["fence.proxy.async"] == 3 + (2 if fp8 else 1)
    assert not kernel.instructions["mma.sync"] and kernel.threads == evidence["threads"]
    if same_compilers(evidence):
        assert kernel.registers <= evidence["registers"] and kernel.spills == evidence["spill_bytes"] == 0
        assert kernel.losses == (), "warpgroups without the registers they ask for, or one product at a time"
    assert config.smem_bytes(576) == evidence["smem_bytes"] <= CHIPS["h200"].smem_per_block
    resident = CHIPS["h200"].blocks_resident(
        registers=kernel.registers, smem=evidence["smem_bytes"], threads=kernel.threads
    )
    assert config.workers == resident * CHIPS["h200"].sms // (heads // 64)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "page", "most"), [(64, 16, 0), (128, 16, 0), (64, 8, 152), (128, 8, 136)])
def test_fp8_rows_in_short_pages_spill_no_more_on_hopper(compiler, heads, page, most):
    """The page of an engine is 16 tokens by default; what 8 cost is in decision 0009."""
    entry, kernels = variant("h200", "fp8", heads, "hopper", page)
    if same_compilers(entry["evidence"]):
        assert kernels["mla_decode_hopper_fp8"].spills <= most
    assert kernels["mla_decode_hopper_fp8"].losses == ()


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX before 0.11 cannot compile for a B200")
@pytest.mark.parametrize("rows", ["plain", "fp8"])
def test_the_blackwell_kernel_stands_on_tcgen05_and_tma(compiler, rows):
    entry, kernels = variant("b200", rows, 128, "blackwell")
    fp8 = rows == "fp8"
    kernel = kernels["mla_decode_blackwell_fp8" if fp8 else "mla_decode_blackwell"]
    evidence, config = entry["evidence"], BlackwellConfig(**entry["config"])
    assert kernel.instructions["tcgen05.mma"] == 576 // 16 + 2 * 64 // 16, (
        "logits by 16 columns; values by 16 tokens, in the loop and after it"
    )
    assert kernel.instructions["cp.async.bulk.tensor"] == (1 if fp8 else 1 + 1 + 320 // 64), (
        "queries; kept columns and tiles, where they are not converted"
    )
    assert kernel.instructions["cvt.rn.f16x2.e4m3x2"] == (64 * 512 // 128 // 2 if fp8 else 0), "two a thread at a time"
    # Which the interpreter does not need: of logits, of what is rescaled by 64 columns, and of the output before the
    # next item's may come, written to one of two places.
    assert kernel.instructions["tcgen05.wait::ld"] == 1 + 256 // 64 + 2
    assert not kernel.instructions["mma.sync"] and kernel.instructions["setmaxnreg"] == 3
    assert kernel.losses == (), "warpgroups without the registers they ask for"
    assert kernel.spills == 0 and kernel.threads == evidence["threads"]
    if same_compilers(evidence):
        found = {"registers": kernel.registers, "spill_bytes": kernel.spills}
        assert all(found[key] <= evidence[key] for key in found), (found, evidence)
    assert config.smem_bytes(512) == evidence["smem_bytes"] <= CHIPS["b200"].smem_per_block
    resident = CHIPS["b200"].blocks_resident(
        registers=kernel.registers, smem=evidence["smem_bytes"], threads=kernel.threads
    )
    assert resident == evidence["blocks_per_sm"] == 1, "a program takes all of tensor memory"
    assert config.workers == CHIPS["b200"].sms // 2, "two programs an item"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "heads"), [("hopper", 64), ("blackwell", 128)])
def test_a_step_of_decode_rows_and_a_tile_takes_the_kernel(compiler, kind, heads):
    """Through `mla_attention`, as the engine calls it: 8 decode rows and one tile of 32 prompt rows."""
    chip = {"hopper": "h200", "blackwell": "b200"}[kind]
    if chip == "b200" and jax.__version_info__ < (0, 11):
        pytest.skip("JAX before 0.11 cannot compile for a B200")
    table = PageTable(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((9, 16), (9,), (9,))))
    attend = partial(mla_attention, value_width=512, tile=32, shares=1, interleave=64, backend="gpu", chip=chip)
    kernels = compile_kernels(
        chip,
        attend,
        jax.ShapeDtypeStruct((8 + 32, heads, 576), jnp.bfloat16),
        jax.ShapeDtypeStruct((8 + 32,), jnp.int32),
        jax.ShapeDtypeStruct((1000, 64, 576), jnp.bfloat16),
        table,
    )
    assert f"mla_decode_{kind}" in kernels and "mla_decode_merge" in kernels
