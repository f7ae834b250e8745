"""Compile every candidate of a kernel's tuning space for GPUs that are not here, and keep the best in its table.

    python scripts/tune_kernels.py --chip h200                       # prints every candidate, writes nothing
    python scripts/tune_kernels.py --chip h200 --heads 64 --write    # and puts the best into tuning.json

The best spills least. Of those that spill alike and whose accounts expect the least time over `LENGTHS`, within what an
account can tell apart (`CLOSE`), it has the most in hand on a multiprocessor (head rows x tokens x blocks), which waits
least, and the deepest pipeline. Nothing is timed: on a GPU `scripts/bench_kernels.py` tells how good the account is.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chip import CHIPS
from pallas_kernels.compiled import KernelFacts, ptxas_version
from pallas_kernels.mla_decode import HopperConfig, TritonConfig, mla_decode
from pallas_kernels.mla_decode.account import account
from pallas_kernels.tuning import entry_for, table
from splash_jax.cost import load_hardware
from splash_jax.preflight.kernels import compile_kernels

OP = "mla_decode"
TABLE = Path(__file__).resolve().parent.parent / "pallas_kernels" / OP / "tuning.json"
LENGTHS = [4096] * 64  # tokens of each row that the account is asked about
CLOSE = 1.1  # accounts leave barriers and latencies out
WIDTH, LATENT = 576, 512  # of DeepSeek-V3's rows
MMA = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")


def candidates(backend: str, heads: int) -> Iterator[dict[str, int]]:
    """Configurations without `workers`, which follow from what the compiler makes of them."""
    if backend == "hopper":
        yield {"stages": 2}
        return
    blocks = sorted({min(heads, block) for block in (32, 64)})
    for block, tokens, warps, stages in product(blocks, (16, 32, 64), (4, 8), (2, 3)):
        yield {"block_heads": block, "block_tokens": tokens, "warps": warps, "stages": stages}


def compiled(chip: str, backend: str, rows: str, heads: int, config: dict[str, int]) -> dict[str, KernelFacts]:
    """The kernels of a decode over DeepSeek-V3's rows in pages of 64."""
    fp8 = rows == "fp8"
    pool = jax.ShapeDtypeStruct((1000, 64, 656 if fp8 else WIDTH), jnp.uint8 if fp8 else jnp.bfloat16)
    q = jax.ShapeDtypeStruct((8, heads, WIDTH), jnp.bfloat16)
    pages, held = jax.ShapeDtypeStruct((8, 128), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    made: Any = {"hopper": HopperConfig, "triton": TritonConfig}[backend](workers=CHIPS[chip].sms, **config)
    decode = partial(mla_decode, value_width=LATENT, backend=backend, chip=chip, config=made)
    return compile_kernels(chip, decode, q, pool, pages, held)


def entry_of(chip: str, backend: str, rows: str, heads: int, config: dict[str, int]) -> dict[str, Any] | None:
    """The table's entry for a configuration; None where no block of it fits on a multiprocessor."""
    try:
        kernels = compiled(chip, backend, rows, heads, config)
    except jax.errors.JaxRuntimeError as error:
        if "Shared memory size limit exceeded" not in str(error):
            raise
        return None
    hopper = "mla_decode_hopper_fp8" if rows == "fp8" else "mla_decode_hopper"
    facts = kernels[hopper if backend == "hopper" else "mla_decode_items"]
    smem = HopperConfig(workers=1, **config).smem_bytes(WIDTH, fp8=rows == "fp8") if backend == "hopper" else facts.smem
    assert smem is not None
    resident = CHIPS[chip].blocks_resident(registers=facts.registers, smem=smem, threads=facts.threads)
    if not resident:
        return None
    head_blocks = max(1, heads // config.get("block_heads", 64))
    return {
        "backend": backend,
        "rows": rows,
        "heads": heads,
        "config": config | {"workers": resident * CHIPS[chip].sms // head_blocks},
        "evidence": {
            "jax": jax.__version__,
            "ptxas": ptxas_version(),
            "registers": facts.registers,
            "spill_bytes": facts.spills,
            "smem_bytes": smem,
            "threads": facts.threads,
            "blocks_per_sm": resident,
            "mma": next(name for name in MMA if facts.instructions[name]),
            "measured": None,
        },
    }


def expected_s(chip: str, entry: dict[str, Any]) -> float:
    """Seconds that the account expects at the chip's published limits."""
    hardware = load_hardware(chip)
    return account(
        LENGTHS, heads=entry["heads"], latent=LATENT, rotary=WIDTH - LATENT, chip=chip, entry=entry,
        bytes_per_s=hardware.hbm_bytes_per_s, flops_per_s=hardware.bf16_flops_per_s,
    ).expected_s  # fmt: skip


def choose(found: list[tuple[dict[str, Any], float]]) -> dict[str, Any]:
    """The best of (entry, expected seconds)."""
    least = min(entry["evidence"]["spill_bytes"] for entry, _ in found)
    clean = [(entry, seconds) for entry, seconds in found if entry["evidence"]["spill_bytes"] == least]
    soon = CLOSE * min(seconds for _, seconds in clean)

    def size(entry: dict[str, Any]) -> tuple[int, ...]:
        config, blocks = entry["config"], entry["evidence"]["blocks_per_sm"]
        heads, tokens = config.get("block_heads", 64), config.get("block_tokens", 64)
        return heads * tokens * blocks, heads, config["stages"], -config.get("warps", 0)

    return max((entry for entry, seconds in clean if seconds <= soon), key=size)


def key_of(entry: dict[str, Any]) -> tuple[str, str, int]:
    """What tells a chip's entries apart."""
    return entry["backend"], entry["rows"], entry["heads"]


def write(chip: str, best: list[dict[str, Any]], path: Path = TABLE) -> None:
    """Replace the chip's entries for the same rows and heads, one entry a line."""
    old = json.loads(path.read_text(encoding="utf-8"))["chips"] if path.exists() else {}
    chips = {name: {key_of(e): e for e in entries} for name, entries in old.items()}
    chips.setdefault(chip, {}).update({key_of(entry): entry for entry in best})
    lines = [
        f'"{name}": [\n' + ",\n".join(json.dumps(entry) for entry in entries.values()) + "\n]"
        for name, entries in chips.items()
    ]
    path.write_text('{\n"chips": {\n' + ",\n".join(lines) + "\n}\n}\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Search, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=sorted(table(OP)), required=True)
    parser.add_argument("--backend", choices=("hopper", "triton"), default="triton")
    parser.add_argument("--rows", choices=("plain", "fp8"), nargs="+", default=["plain", "fp8"])
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--keep", action="store_true", help="compile the table's own configurations only")
    parser.add_argument("--write", action="store_true", help="put the best into tuning.json")
    options = parser.parse_args(arguments)
    print(f"{options.chip}, JAX {jax.__version__}, ptxas {ptxas_version()}")
    best = []
    for rows, heads in product(options.rows, options.heads):
        configs = list(candidates(options.backend, heads))
        if options.keep:
            known = entry_for(OP, options.chip, options.backend, rows, heads)["config"]
            configs = [{key: value for key, value in known.items() if key != "workers"}]
        found = []
        for config in configs:
            told = " ".join(f"{name}={value}" for name, value in config.items())
            entry = entry_of(options.chip, options.backend, rows, heads, config)
            if entry is None:
                print(f"{rows:5} {heads:3} heads  {told:56} does not fit", flush=True)
                continue
            evidence, seconds = entry["evidence"], expected_s(options.chip, entry)
            print(
                f"{rows:5} {heads:3} heads  {told:56} {evidence['registers']:3} registers, "
                f"{evidence['spill_bytes']:5} B spilled, {evidence['smem_bytes']:6} B shared, "
                f"{evidence['blocks_per_sm']} per SM, {evidence['mma']:15} expected {seconds * 1e6:6.1f} us",
                flush=True,
            )
            found.append((entry, seconds))
        if not found:
            print(f"{options.backend} has no configuration for {heads} heads of {rows} rows that fits.")
            return 1
        best.append(choose(found))
        print(f"{rows:5} {heads:3} heads  best: {best[-1]['config']}", flush=True)
    if options.write:
        write(options.chip, best)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
