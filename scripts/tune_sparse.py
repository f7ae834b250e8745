"""Compile candidates of `sparse_mla` and `indexer_topk` for a GPU that is not here, and keep the best in their tables.

    python scripts/tune_sparse.py --chip h200                   # prints every candidate, writes nothing
    python scripts/tune_sparse.py --chip h200 --write           # and puts the best into tuning.json
    python scripts/tune_sparse.py --chip h200 --op sparse_mla --heads 64 --rows fp8

The best spills least; among those alike it is the one whose accounts expect the least time, of attention over `DECODES`
and `PROMPT_ROWS` together. Nothing is timed.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tune_kernels import MMA, write

from pallas_kernels.chip import CHIPS
from pallas_kernels.compiled import KernelFacts, ptxas_version
from pallas_kernels.indexer_topk import LogitsConfig, SelectConfig, top_k, triton
from pallas_kernels.indexer_topk.account import account_logits, account_select
from pallas_kernels.mla_decode import TritonConfig
from pallas_kernels.sparse_mla import sparse_mla
from pallas_kernels.sparse_mla.account import account
from splash_jax.cost import load_hardware
from splash_jax.preflight.kernels import compile_kernels

ROOT = Path(__file__).resolve().parent.parent
# Block of heads, block of tokens, warps, stages.
BLOCKS = {
    16: [(16, 64, 4, 3), (16, 32, 4, 3), (16, 64, 8, 3)],
    32: [(32, 64, 4, 3), (32, 32, 8, 3), (32, 64, 8, 3)],
    64: [(32, 64, 4, 3), (32, 32, 8, 3), (64, 16, 8, 3), (64, 32, 8, 3), (64, 64, 8, 2)],
}
# Block of tokens, query rows that share a key, warps, stages.
LOGITS = [(128, 2, 4, 3), (128, 2, 8, 3), (64, 2, 4, 3)]
# Block, chunk, warps.
SELECTS = [(2048, 32768, 8), (4096, 32768, 8), (4096, 32768, 16)]
DECODES, PROMPT_ROWS = [2048] * 128, [2048] * 256  # tokens of each row that the accounts are asked about
PROMPT = [32768] * 1024  # and of the indexer
INDEX_HEADS, INDEX_WIDTH, TOP = 64, 128, 2048  # of DeepSeek-V3.2


def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An array to compile for."""
    return jax.ShapeDtypeStruct(shape, dtype)


def facts_of(chip: str, kernel: KernelFacts) -> dict[str, Any]:
    """What the table keeps of a kernel."""
    assert kernel.smem is not None
    resident = CHIPS[chip].blocks_resident(registers=kernel.registers, smem=kernel.smem, threads=kernel.threads)
    told = {
        "registers": kernel.registers,
        "spill_bytes": kernel.spills,
        "smem_bytes": kernel.smem,
        "threads": kernel.threads,
        "blocks_per_sm": resident,
    }
    mma = next((name for name in MMA if kernel.instructions[name]), None)
    return told | ({} if mma is None else {"mma": mma})


def limits(chip: str) -> dict[str, Any]:
    """The chip's published ones."""
    hardware = load_hardware(chip)
    return {"bytes_per_s": hardware.hbm_bytes_per_s, "flops_per_s": hardware.bf16_flops_per_s}


def compilers() -> dict[str, str]:
    """Whose evidence it is."""
    return {"jax": jax.__version__, "ptxas": ptxas_version()}


@cache
def sparse_facts(chip: str, fp8: bool, block: tuple[int, int, int, int]) -> dict[str, Any] | None:
    """Of DeepSeek-V3.2's rows in pages of 64; None where no block fits."""
    heads, tokens, warps, stages = block
    config = TritonConfig(block_heads=heads, block_tokens=tokens, warps=warps, stages=stages, workers=CHIPS[chip].sms)
    attend = partial(sparse_mla, value_width=512, backend="triton", config=config)
    pool = struct((1000, 64, 656), jnp.uint8) if fp8 else struct((1000, 64, 576), jnp.bfloat16)
    lists = struct((8, TOP), jnp.int32), struct((8, 128), jnp.int32)
    try:
        kernels = compile_kernels(chip, attend, struct((8, heads, 576), jnp.bfloat16), pool, *lists)
    except jax.errors.JaxRuntimeError as error:
        if "Shared memory size limit exceeded" not in str(error):
            raise
        return None
    return facts_of(chip, kernels["sparse_mla_items"])


def sparse_entries(chip: str, rows: str, heads: int) -> Iterator[tuple[dict[str, Any], float]]:
    """Entries of every candidate, and the seconds that their accounts expect."""
    for block in BLOCKS[min(heads, 64)]:
        found = sparse_facts(chip, rows == "fp8", block)
        if found is None or not found["blocks_per_sm"]:
            continue
        names = ("block_heads", "block_tokens", "warps", "stages")
        workers = found["blocks_per_sm"] * CHIPS[chip].sms // max(1, heads // block[0])
        config = dict(zip(names, block, strict=True)) | {"workers": workers}
        entry = {"backend": "triton", "rows": rows, "heads": heads, "config": config}
        entry["evidence"] = compilers() | found | {"measured": None}
        how = {"heads": heads, "latent": 512, "rotary": 64, "chip": chip, "entry": entry} | limits(chip)
        prompt = account(PROMPT_ROWS, distinct=max(PROMPT), **how)
        yield entry, account(DECODES, **how).expected_s + prompt.expected_s


def logits_facts(chip: str, fp8: bool, config: LogitsConfig, tile: int) -> dict[str, Any]:
    """Of 64 rows, every `tile` of one sequence of 32,768 tokens in pages of 64."""
    pool = struct((1000, 64, INDEX_WIDTH + 4), jnp.uint8) if fp8 else struct((1000, 64, INDEX_WIDTH), jnp.bfloat16)
    q = struct((64, INDEX_HEADS, INDEX_WIDTH), jnp.float8_e4m3fn if fp8 else jnp.bfloat16)
    weights, lengths = struct((64, INDEX_HEADS), jnp.float32), struct((64,), jnp.int32)
    pages = struct((64 // tile, 512), jnp.int32)
    kernels = compile_kernels(chip, partial(triton.logits, config=config), q, weights, pool, pages, lengths)
    return facts_of(chip, kernels["indexer_topk_logits"])


@cache
def select_facts(chip: str, select: tuple[int, int, int]) -> dict[str, dict[str, Any]]:
    """Of both launches of a selection from rows of 131,072."""
    config = SelectConfig(**dict(zip(("block", "chunk", "warps"), select, strict=True)))
    choose = partial(top_k, k=TOP, backend="triton", config=config)
    kernels = compile_kernels(chip, choose, struct((64, 131072), jnp.float32), struct((64,), jnp.int32))
    names = {"select": "indexer_topk_select", "merge": "indexer_topk_merge"}
    return {what: facts_of(chip, kernels[name]) for what, name in names.items()}


def indexer_entries(chip: str, rows: str, _heads: int) -> Iterator[tuple[dict[str, Any], float]]:
    """Entries of every candidate, and the seconds that their accounts expect."""
    fp8 = rows == "fp8"
    for tokens, shared, warps, stages in LOGITS:
        # Triton multiplies FP8 into float32 as it is where the tensor cores sum in float32: not on Hopper.
        config = LogitsConfig(
            block_tokens=tokens, blocks=1024 // tokens, rows=shared, warps=warps, stages=stages,
            fp8_products=fp8 and CHIPS[chip].capability >= (10, 0),
        )  # fmt: skip
        own = {"logits": logits_facts(chip, fp8, config, 16), "logits_decode": logits_facts(chip, fp8, config, 1)}
        for select in SELECTS:
            chosen = {name: getattr(config, name) for name in config.__dataclass_fields__}
            entry = {
                "backend": "triton", "rows": rows, "heads": INDEX_HEADS,
                "config": {"logits": chosen, "select": dict(zip(("block", "chunk", "warps"), select, strict=True))},
                "evidence": compilers() | own | select_facts(chip, select) | {"measured": None},
            }  # fmt: skip
            how: dict[str, Any] = {"chip": chip, "entry": entry} | limits(chip)
            seconds = account_logits(PROMPT, tile=16, heads=INDEX_HEADS, width=INDEX_WIDTH, **how).expected_s
            yield entry, seconds + account_select(PROMPT, columns=PROMPT[0], k=TOP, **how).expected_s


def spilled(entry: dict[str, Any]) -> int:
    """Bytes, of all its kernels."""
    evidence = entry["evidence"]
    parts = [part for part in evidence.values() if isinstance(part, dict)] or [evidence]
    return sum(part["spill_bytes"] for part in parts)


OPS = {"sparse_mla": (sparse_entries, (16, 32, 64, 128)), "indexer_topk": (indexer_entries, (INDEX_HEADS,))}


def main(arguments: list[str]) -> int:
    """Search, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=("h200", "b200"), required=True)
    parser.add_argument("--op", choices=sorted(OPS), nargs="+", default=list(OPS))
    parser.add_argument("--rows", choices=("plain", "fp8"), nargs="+", default=["plain", "fp8"])
    parser.add_argument("--heads", type=int, nargs="+", help="per rank, of sparse_mla; all of its table without")
    parser.add_argument("--write", action="store_true", help="put the best into tuning.json")
    options = parser.parse_args(arguments)
    print(f"{options.chip}, JAX {jax.__version__}, ptxas {ptxas_version()}")
    for op in options.op:
        entries, heads_of = OPS[op]
        best = []
        for rows, heads in product(options.rows, (op == "sparse_mla" and options.heads) or heads_of):
            found = []
            for entry, seconds in entries(options.chip, rows, heads):
                found.append((spilled(entry), seconds, len(found), entry))
                print(f"{op} {rows} {heads}: {entry['config']} {spilled(entry)} B spilled, "
                      f"expected {seconds * 1e6:.1f} us", flush=True)  # fmt: skip
            best.append(min(found)[-1])
            print(f"{op} {rows} {heads}: best is {json.dumps(best[-1])}", flush=True)
        if options.write:
            write(options.chip, best, ROOT / "pallas_kernels" / op / "tuning.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
