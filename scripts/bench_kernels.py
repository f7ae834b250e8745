"""Check every kernel against its reference, time it, and compare with what the chip does at most.

    python scripts/bench_kernels.py --json kernels.json      # on one GPU: under eight minutes
    python scripts/bench_kernels.py --dry --json kernels.json  # tiny shapes in interpret mode, on any machine
    python scripts/bench_kernels.py --account h200           # what is expected, and runs nothing

First the ceilings: a device copy and a matrix product of this machine, in this session. Then each kernel over its
shapes: its largest error against the float32 reference, the median time of calls over buffers that take turns (so that
no call finds its data in L2), achieved bytes/s and FLOP/s as shares of the ceilings, and the time that the account in
`pallas_kernels` expected before anything was measured. A dry run prints errors only.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_prefill import expected_prefill, prefill_rows
from bench_sparse import SPARSE_ROWS, expected_sparse_lines, sparse_rows
from bench_timing import expectation, seconds_of, shares

from pallas_kernels.chip import this_chip
from pallas_kernels.dop_exchange import PACKS
from pallas_kernels.mla_decode import TritonConfig, mla_decode, pack_fp8
from pallas_kernels.mla_decode.account import account
from pallas_kernels.mla_decode.api import order_of
from pallas_kernels.mla_decode.tuning import config_for
from pallas_kernels.page_move import gather_pages, scatter_pages
from pallas_kernels.tuning import entry_for, table
from splash_jax.cli.process import command
from splash_jax.cost import load_hardware
from splash_jax.engine.platform import spare_the_trace
from splash_jax.errors import ConfigError
from splash_jax.files import check_target, write_text

# FlashMLA's README, on an H800: another chip than ours may be.
PUBLISHED = {
    "FlashMLA dense decode, memory-bound": {"bytes_per_s": 3.0e12},
    "FlashMLA dense decode, compute-bound": {"flops_per_s": 6.6e14},
    "FlashMLA sparse decode, FP8 KV": {"flops_per_s": 4.1e14},
    "FlashMLA sparse prefill": {"flops_per_s": 6.4e14},
}
PAGE = 64
WORST_ERROR = 0.05  # of a decode's outputs, relative to 1 + |value|; tests/kernels has the tight tolerances


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decode over `batch` rows of about `context` tokens each (from a half to three halves where `ragged`)."""

    batch: int
    context: int
    heads: int
    fp8: bool
    ragged: bool = False

    def held(self) -> np.ndarray:
        """i32[batch], the same every time."""
        if not self.ragged:
            return np.full(self.batch, self.context, np.int32)
        spread = np.random.default_rng(0).uniform(0.5, 1.5, self.batch)
        return (spread * self.context).astype(np.int32)


# Heads per rank: 16 is DeepSeek-V3 split over 8 ranks (tp), 128 is whole (dp, and a dop owner).
SHAPES = [
    Shape(batch=b, context=n, heads=h, fp8=fp8, ragged=r)
    for fp8 in (False, True)
    for b, n, h, r in ((128, 4096, 128, False), (128, 8192, 64, True), (64, 16384, 16, True), (4, 131072, 16, False))
]
DRY = [Shape(batch=3, context=40, heads=16, fp8=fp8, ragged=True) for fp8 in (False, True)]


def ceilings(dry: bool, budget_s: float) -> dict[str, float]:
    """This machine's copy, bytes read and written per second, and its BF16 matrix product, FLOPs per second."""
    size, side = (1 << 20, 256) if dry else (1 << 30, 8192)
    copy = jax.jit(lambda x: x + jnp.uint8(1))
    sources = [jnp.zeros(size, jnp.uint8) + jnp.uint8(i) for i in range(2)]
    copied = seconds_of([partial(copy, x) for x in sources], budget_s)
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in range(2))
    product = jax.jit(lambda x, y: x @ y)
    multiplied = seconds_of([partial(product, a, b)], budget_s)
    return {"copy_bytes_per_s": 2 * size / copied, "matmul_flops_per_s": 2 * side**3 / multiplied}


def decode_rows(shape: Shape, limits: dict[str, float], dry: bool, budget_s: float) -> Iterator[dict[str, Any]]:
    """One row per backend that takes the shape."""
    latent, rotary = (128, 16) if dry else (512, 64)
    held, rng = shape.held(), np.random.default_rng(1)
    width = -(-int(held.max()) // PAGE)
    count = int((-(-held // PAGE)).sum())
    pages = np.zeros((shape.batch, width), np.int32)
    numbers = iter(rng.permutation(count).tolist())
    for row, n in enumerate(held):
        for column in range(-(-int(n) // PAGE)):
            pages[row, column] = next(numbers)
    make = jax.jit(lambda key: jax.random.normal(key, (count, PAGE, latent + rotary), jnp.bfloat16))
    pools = [make(jax.random.key(i)) for i in range(2)]
    if shape.fp8:
        pools = [jax.jit(partial(pack_fp8, latent=latent))(pool) for pool in pools]
    q = jax.random.normal(jax.random.key(9), (shape.batch, shape.heads, latent + rotary), jnp.bfloat16)
    q = q * jnp.bfloat16((latent + rotary) ** -0.5)
    chip, rows = this_chip(), "fp8" if shape.fp8 else "plain"
    few = min(shape.batch, 4)  # that the reference, which gathers whole histories, has room for

    for backend in ("triton",) if dry else ("blackwell", "hopper", "triton"):
        options: dict[str, Any] = {"value_width": latent, "backend": backend, "interpret": dry}
        try:
            options["config"] = (
                TritonConfig(block_heads=16, block_tokens=16, warps=4, stages=2, workers=2)
                if dry or chip is None
                else config_for(chip.name, backend, rows, shape.heads)
            )
            decode = jax.jit(partial(mla_decode, **options))
            out, lse = decode(q, pools[0], pages, held)
        except NotImplementedError as refusal:
            yield {"kernel": f"mla_decode {backend}", "shape": label(shape), "refused": str(refusal)}
            continue
        want, want_lse = jax.jit(partial(mla_decode, value_width=latent, backend="ref"))(
            q[:few], pools[0], pages[:few], held[:few]
        )
        error = max(
            float(jnp.max(jnp.abs(got - wanted) / (1 + jnp.abs(wanted))))
            for got, wanted in ((out[:few], want), (lse[:few], want_lse))
        )
        work = options["config"].plan(jnp.asarray(held))  # once per step, as an engine does
        timed = jax.jit(partial(mla_decode, **options))
        took = seconds_of([partial(timed, q, pool, pages, held, work=work) for pool in pools], budget_s)
        row = {"kernel": f"mla_decode {backend}", "shape": label(shape), "seconds": took, "error": error}
        row["ok"] = bool(error <= WORST_ERROR)
        if chip is not None:
            hardware = load_hardware(chip.name)
            found = account(
                held.tolist(), heads=shape.heads, latent=latent, rotary=rotary, chip=chip.name,
                entry=entry_for("mla_decode", chip.name, backend, rows, shape.heads),
                bytes_per_s=hardware.hbm_bytes_per_s, flops_per_s=hardware.bf16_flops_per_s,
            )  # fmt: skip
            row |= {"bytes": found.bytes, "flops": found.flops, "expected_seconds": found.expected_s}
        else:
            tokens = int(held.sum())
            row |= {"bytes": tokens * pools[0].shape[-1] * pools[0].dtype.itemsize}
            row |= {"flops": 2 * shape.heads * tokens * (2 * latent + rotary)}
        yield shares(row, limits)


def expected_lines(chip: str) -> Iterator[str]:
    """What the account expects of every shape and backend on a chip, at its published limits."""
    hardware = load_hardware(chip)
    yield f"{chip}, by published limits: {hardware.hbm_bytes_per_s / 1e12:.1f} TB/s, " + (
        f"{hardware.bf16_flops_per_s / 1e12:.0f} TFLOP/s in BF16. Nothing is measured. * is what a call takes first."
    )
    for shape in SHAPES:
        first = order_of(chip, shape.heads, fp8=shape.fp8)[0]
        for backend in ("blackwell", "hopper", "triton"):
            try:
                entry = entry_for("mla_decode", chip, backend, "fp8" if shape.fp8 else "plain", shape.heads)
            except NotImplementedError:
                continue
            found = account(
                shape.held().tolist(), heads=shape.heads, latent=512, rotary=64, chip=chip, entry=entry,
                bytes_per_s=hardware.hbm_bytes_per_s, flops_per_s=hardware.bf16_flops_per_s,
            )  # fmt: skip
            counted = "not counted" if backend == "triton" else "counted"
            note = f"; conversions, {counted}: {found.conversions_s * 1e6:.1f} us" if shape.fp8 else ""
            yield expectation(f"{'*' if backend == first else ' '} mla_decode {backend}", label(shape), found, note)


def moving_rows(limits: dict[str, float], dry: bool, budget_s: float) -> Iterator[dict[str, Any]]:
    """Pages gathered and scattered, and queries packed, compared bit by bit."""
    count, taken = (16, 8) if dry else (16384, 8192)
    how: dict[str, Any] = {"backend": "triton", "interpret": dry}
    pools = [jax.random.bits(jax.random.key(i), (count, PAGE, 656 if not dry else 36), jnp.uint8) for i in range(2)]
    slots = jnp.asarray(np.random.default_rng(0).permutation(count)[:taken], jnp.int32)
    gather = jax.jit(partial(gather_pages, **how))
    same = bool((gather(pools[0], slots) == gather_pages(pools[0], slots, backend="ref")).all())
    took = seconds_of([partial(gather, pool, slots) for pool in pools], budget_s)
    moved = 2 * taken * pools[0][0].size
    yield shares({"kernel": "page_move gather", "shape": f"{taken} pages of {pools[0][0].size} B", "seconds": took,
                  "ok": same, "bytes": moved}, limits)  # fmt: skip
    sources = gather(pools[1], slots)
    scatter = jax.jit(partial(scatter_pages, **how), donate_argnums=0)
    want = scatter_pages(pools[0], slots, sources, backend="ref")
    live = [scatter(pools[0] + jnp.uint8(0), slots, sources)]
    same = bool((live[0] == want).all())

    def again() -> jax.Array:
        live[0] = scatter(live[0], slots, sources)
        return live[0]

    took = seconds_of([again], budget_s)
    yield shares({"kernel": "page_move scatter", "shape": f"{taken} pages of {pools[0][0].size} B", "seconds": took,
                  "ok": same, "bytes": moved}, limits)  # fmt: skip
    N, widths = (8, (16, 8)) if dry else (8192, (256, 32))
    parts = tuple(jax.random.bits(jax.random.key(i), (N, 16, width), jnp.uint32) for i, width in enumerate(widths))
    rows = jnp.asarray(np.random.default_rng(1).permutation(N), jnp.int32)
    pack = jax.jit(partial(PACKS["triton"], interpret=dry))
    same = bool((pack(parts, rows) == PACKS["ref"](parts, rows)).all())
    took = seconds_of([partial(pack, parts, rows)], budget_s)
    yield shares({"kernel": "dop_exchange pack", "shape": f"{N} rows of 16 heads", "seconds": took, "ok": same,
                  "bytes": 2 * sum(part.nbytes for part in parts)}, limits)  # fmt: skip


def label(shape: Shape) -> str:
    """The shape in a table's cell."""
    return f"{shape.batch} x {shape.context}{' ragged' if shape.ragged else ''}, {shape.heads} heads, " + (
        "FP8" if shape.fp8 else "BF16"
    )


def line(row: dict[str, Any], dry: bool = False) -> str:
    """One row of the table; of a dry run without times."""
    text = f"{row['kernel']:22} {row['shape']:38}"
    if "refused" in row:
        return f"{text} refused: {row['refused']}"
    verdict = ("" if "error" not in row else f" error {row['error']:.1e}") + (" ok" if row["ok"] else "  WRONG")
    if dry:
        return text + verdict
    text += f" {row['seconds'] * 1e3:9.3f} ms {row['bytes_per_s'] / 1e9:7.0f} GB/s"
    text += f" {row['of_copy']:6.1%} of copy"
    if "flops" in row:
        text += f" {row['flops_per_s'] / 1e12:6.1f} TFLOP/s {row['of_matmul']:6.1%} of matmul"
    if "expected_seconds" in row:
        text += f" expected {row['expected_seconds'] * 1e3:.3f} ms"
    return text + verdict


def main(arguments: list[str]) -> int:
    """Run, print, write; 1 if a kernel is wrong or there is no GPU to measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write every number")
    parser.add_argument(
        "--dry", action="store_true", help="tiny shapes in interpret mode: nothing it times means a thing"
    )
    parser.add_argument("--seconds", type=float, default=360, help="for timing, over all kernels")
    parser.add_argument("--account", choices=sorted(table("mla_decode")), help="print what is expected, run nothing")
    options = parser.parse_args(arguments)
    if options.account and (options.dry or options.json):
        parser.error("--account runs nothing and writes nothing: leave --dry and --json out.")
    try:
        check_target(options.json)
    except ConfigError as error:
        parser.error(f"--json: {error}")
    if options.account:
        lines = (expected_lines, expected_prefill, expected_sparse_lines)
        print("\n".join(line for expected in lines for line in expected(options.account)))
        return 0
    spare_the_trace()
    if not options.dry and this_chip() is None:
        print(f"{jax.devices()[0].device_kind} is no GPU these kernels are tuned for: try --dry.", file=sys.stderr)
        return 1
    shapes = DRY if options.dry else SHAPES
    budget_s = options.seconds / (2 + 2 * len(shapes) + 13 + SPARSE_ROWS)
    limits = ceilings(options.dry, budget_s)
    if options.dry:
        print("Triton's kernels in interpret mode; tests/kernels/test_mla_decode_mosaic.py interprets Mosaic GPU's.")
    else:
        print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}: copy {limits['copy_bytes_per_s'] / 1e9:.0f} "
              f"GB/s, matmul {limits['matmul_flops_per_s'] / 1e12:.1f} TFLOP/s")  # fmt: skip
    rows = []
    for shape in shapes:
        for row in decode_rows(shape, limits, options.dry, budget_s):
            rows.append(row)
            print(line(row, options.dry), flush=True)
    for row in prefill_rows(options.dry, partial(seconds_of, budget_s=budget_s)):
        rows.append(shares(row | {"ok": row["error"] <= WORST_ERROR}, limits))
        print(line(rows[-1], options.dry), flush=True)
    for row in chain(sparse_rows(limits, options.dry, budget_s), moving_rows(limits, options.dry, budget_s)):
        rows.append(row)
        print(line(row, options.dry), flush=True)
    if options.json:
        told = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "dry": options.dry}
        told |= {"ceilings": limits, "kernels": rows, "published_h800": PUBLISHED}
        write_text(options.json, json.dumps(told, indent=1) + "\n")
    units = {"bytes_per_s": "TB/s", "flops_per_s": "TFLOP/s"}
    for name, figures in PUBLISHED.items() if not options.dry else ():
        for key, value in figures.items():
            print(f"published, H800: {name}: {value / 1e12:.0f} {units[key]}")
    return 0 if all(row.get("ok", True) for row in rows) else 1


if __name__ == "__main__":
    with command():
        sys.exit(main(sys.argv[1:]))
