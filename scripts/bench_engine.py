"""Decode and prefill speed of the engine beside Hugging Face and beside what this machine can do at most.

    python scripts/bench_engine.py                    # one device, Hugging Face if torch and transformers are installed
    python scripts/bench_engine.py --devices 2,4,8    # all layouts on virtual devices

Every case runs on each side in turn, in one session, on the same random DeepSeek-V3-like weights (116.5 M parameters).
The times are this machine's; on virtual CPU devices all ranks share its cores, so layouts cannot be ranked by them.
"""

import argparse
import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench_workers import CONFIG, Case, Limits, Worker, cpu_name, engine_worker, hugging_face_worker, limits_worker
from rich.table import Table

from splash_jax.cli.process import command
from splash_jax.files import check_target, write_csv
from splash_jax.progress import make_console

console = make_console()


def main() -> None:
    args = _arguments()
    check_target(args.csv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        with Worker(limits_worker, folder) as measure:
            limits = Limits(**measure.ask(None))
        console.print(
            f"{cpu_name()}, {os.cpu_count()} logical CPUs; memory {limits.bytes_per_s / 1e9:.1f} GB/s, float32 matmul "
            f"{limits.flops_per_s / 1e9:.0f} GFLOP/s (measured now, on all cores)"
        )
        rows = []
        for devices in args.devices:
            rows += _one_device(args, folder, limits) if devices == 1 else _layouts(args, folder, devices)
    if args.csv:
        write_csv(args.csv, dict.fromkeys(name for row in rows for name in row), rows)
        console.print(f"written to {args.csv}")


def _one_device(args: argparse.Namespace, folder: Path, limits: Limits) -> list[dict[str, Any]]:
    table = Table(
        "batch x context", "HF tok/s", "engine tok/s", "ratio", "limit", "bound by", "HF prefill", "engine prefill",
        title="decode, one device, float32: medians (interquartile range)",
    )  # fmt: skip
    rows = []
    with Worker(engine_worker, folder, 1, "tp") as engine, Worker(hugging_face_worker, folder) as reference:
        for case in (Case(b, c, args.new) for c in args.contexts for b in args.batches):
            ours = engine.ask(case)
            theirs = None if args.skip_hf else reference.ask(case)
            most, bound = limits.decode(case)
            mine = _rate(case, ours["step_s"])
            row: dict[str, Any] = {"devices": 1, "layout": "tp", "batch": case.batch, "context": case.context}
            row |= {
                "engine_tok_s": mine[0],
                "limit_tok_s": most,
                "bound": bound,
                "engine_prefill": ours["prefill_tok_s"],
            }
            cells = [f"{case.batch} x {case.context}", "-", _spread(mine), "-", f"{most:.0f}", bound, "-"]
            if theirs is not None:
                other = _rate(case, theirs["step_s"])
                row |= {"hf_tok_s": other[0], "ratio": mine[0] / other[0], "hf_prefill": theirs["prefill_tok_s"]}
                cells[1], cells[3] = _spread(other), f"{mine[0] / other[0]:.1f}x"
                cells[6] = f"{theirs['prefill_tok_s']:.0f}"
            rows.append(row)
            table.add_row(*cells, f"{ours['prefill_tok_s']:.0f}")
            console.print("  ".join(cells), style="dim")
    console.print(table)
    return rows


def _layouts(args: argparse.Namespace, folder: Path, devices: int) -> list[dict[str, Any]]:
    table = Table("batch x context", "tp", "dp", "cp", "dop", title=f"decode tok/s, {devices} CPU devices")
    cases = [Case(b, c, args.new) for c in args.contexts for b in args.batches if b * c <= args.most_tokens]
    rates: dict[tuple[str, Case], tuple[float, float, float]] = {}
    rows = []
    for layout in ("tp", "dp", "cp", "dop"):
        with Worker(engine_worker, folder, devices, layout) as engine:
            for case in cases:
                answer = engine.ask(case)
                rates[layout, case] = _rate(case, answer["step_s"])
                rows.append(
                    {"devices": devices, "layout": layout, "batch": case.batch, "context": case.context,
                     "engine_tok_s": rates[layout, case][0], "engine_prefill": answer["prefill_tok_s"]}
                )  # fmt: skip
                console.print(f"{devices} devices {layout} {case.batch} x {case.context}", style="dim")
    for case in cases:
        cells = [_spread(rates[layout, case]) for layout in ("tp", "dp", "cp", "dop")]
        table.add_row(f"{case.batch} x {case.context}", *cells)
    console.print(table)
    return rows


def _rate(case: Case, seconds: list[float]) -> tuple[float, float, float]:
    """Median tokens per second over steps, and its quartiles; NaN where the whole batch never ran in one step."""
    if len(seconds) < 2:
        return math.nan, math.nan, math.nan
    low, middle, high = statistics.quantiles(seconds, n=4)
    return case.batch / middle, case.batch / high, case.batch / low


def _spread(rate: tuple[float, float, float]) -> str:
    return f"{rate[0]:.1f} ({rate[1]:.1f}-{rate[2]:.1f})"


def _arguments() -> argparse.Namespace:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=numbers, default=[1])
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--contexts", type=numbers, default=[128, 1024, 4096])
    parser.add_argument("--new", type=int, default=24, help="tokens to draw per request")
    parser.add_argument(
        "--most-tokens", type=int, default=32768, help="skip larger batch x context with several devices"
    )
    parser.add_argument("--skip-hf", action="store_true")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    console.print(f"model: {CONFIG['num_hidden_layers']} layers, hidden {CONFIG['hidden_size']}, random weights")
    return args


if __name__ == "__main__":
    with command():
        main()
