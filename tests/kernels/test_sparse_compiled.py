"""Sparse attention and the indexer compiled for their GPUs: what they stand on is there, and none got fatter."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.chip import CHIPS
from pallas_kernels.compiled import KernelFacts, ptxas_version
from pallas_kernels.indexer_topk import indexer_topk
from pallas_kernels.sparse_mla import sparse_mla
from pallas_kernels.tuning import entry_for, table
from splash_jax.preflight.kernels import compile_kernels

MMA = {"mma.sync", "wgmma.mma_async", "tcgen05.mma"}


def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def check(chip: str, entry: dict[str, Any], evidence: dict[str, Any], kernel: KernelFacts) -> None:
    """A kernel is what the table says of it; registers and spills are one pair of compilers' own."""
    assert {name for name in MMA if kernel.instructions[name]} == ({evidence["mma"]} if "mma" in evidence else set())
    assert kernel.threads == evidence["threads"]
    if (entry["evidence"]["jax"], entry["evidence"]["ptxas"]) == (jax.__version__, ptxas_version()):
        found = {"registers": kernel.registers, "spill_bytes": kernel.spills, "smem_bytes": kernel.smem}
        assert all(found[key] <= evidence[key] for key in found), (found, evidence)
    resident = CHIPS[chip].blocks_resident(registers=kernel.registers, smem=kernel.smem or 0, threads=kernel.threads)
    assert resident >= evidence["blocks_per_sm"]  # a selection among fewer columns takes fewer registers


def sparse(chip: str, rows: str, heads: int, queries: int, sequences: int) -> dict[str, KernelFacts]:
    """DeepSeek-V3.2's latent rows, pages of 64, 2,048 tokens a row."""
    pool = struct((1000, 64, 656 if rows == "fp8" else 576), jnp.uint8 if rows == "fp8" else jnp.bfloat16)
    attend = partial(sparse_mla, value_width=512, backend="triton", chip=chip)
    lists = struct((queries, 2048), jnp.int32), struct((sequences, 128), jnp.int32)
    return compile_kernels(chip, attend, struct((queries, heads, 576), jnp.bfloat16), pool, *lists)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "heads"), [("fp8", 16), ("fp8", 128), ("plain", 32), ("plain", 64)])
def test_sparse_attention_compiles_to_what_the_table_says(chip, rows, heads):
    entry, kernels = entry_for("sparse_mla", chip, "triton", rows, heads), sparse(chip, rows, heads, 8, 8)
    config, kernel = entry["config"], kernels["sparse_mla_items"]
    check(chip, entry, entry["evidence"], kernel)
    assert kernel.spills == 0 and kernel.instructions["cp.async.cg"], "the gather is pipelined"
    assert bool(kernel.instructions["cvt.rn.f16x2.e4m3x2"]) == (rows == "fp8")
    blocks = max(1, heads // config["block_heads"])
    assert config["workers"] == entry["evidence"]["blocks_per_sm"] * CHIPS[chip].sms // blocks
    merge = kernels["sparse_mla_merge"]
    assert merge.spills == 0 and merge.grid == (heads, 8, 1)


@pytest.mark.slow
def test_a_prompt_is_not_merged(chip):
    """2,048 rows of one sequence: a program for each and every block of heads, and no second launch."""
    kernels = sparse(chip, "fp8", 16, 2048, 1)
    assert "sparse_mla_merge" not in kernels and kernels["sparse_mla_items"].grid == (1, 2048, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "sequences"), [("fp8", 64), ("fp8", 4), ("plain", 4)])
def test_the_indexer_compiles_to_what_the_table_says(chip, rows, sequences):
    """64 decodes, or 16 prompt rows of each of 4 sequences, of up to 65,536 tokens: two chunks to choose from."""
    fp8 = rows == "fp8"
    kernels = compile_kernels(
        chip,
        partial(indexer_topk, k=2048, backend="triton", chip=chip),
        struct((64, 64, 128), jnp.float8_e4m3fn if fp8 else jnp.bfloat16),
        struct((64, 64), jnp.float32),
        struct((5000, 64, 132), jnp.uint8) if fp8 else struct((5000, 64, 128), jnp.bfloat16),
        struct((sequences, 1024), jnp.int32),
        struct((64,), jnp.int32),
    )
    entry = entry_for("indexer_topk", chip, "triton", rows, 64)
    logits, decode = kernels["indexer_topk_logits"], sequences == 64
    check(chip, entry, entry["evidence"]["logits_decode" if decode else "logits"], logits)
    assert logits.spills == 0 and (logits.instructions["cp.async.cg"] or logits.instructions["cp.async.ca"])
    assert logits.grid[0] == 64 // (1 if decode else entry["config"]["logits"]["rows"])
    converted = fp8 and CHIPS[chip].capability < (10, 0)  # on Hopper Triton's FP8 products do not sum in float32
    assert bool(logits.instructions["cvt.rn.f16x2.e4m3x2"]) == converted
    for name, part in (("indexer_topk_select", "select"), ("indexer_topk_merge", "merge")):
        check(chip, entry, entry["evidence"][part], kernels[name])
        assert kernels[name].spills == 0
    assert kernels["indexer_topk_select"].grid == (2, 64, 1) and kernels["indexer_topk_merge"].grid == (1, 64, 1)


@pytest.mark.parametrize("op", ["sparse_mla", "indexer_topk"])
def test_nothing_in_the_tables_spills(op):
    assert set(table(op)) == {"h200", "b200"}
    for chip, entries in table(op).items():
        for entry in entries:
            evidence = entry["evidence"]
            parts = [part for part in evidence.values() if isinstance(part, dict)] or [evidence]
            for part in parts:
                assert part["spill_bytes"] == 0, (op, chip, entry)
                fits = {"registers": part["registers"], "smem": part["smem_bytes"], "threads": part["threads"]}
                assert CHIPS[chip].blocks_resident(**fits) == part["blocks_per_sm"] > 0
