"""The engine in float32 beside itself in bfloat16, on this machine: what `dtype="auto"` should mean on a platform.

    python scripts/bench_dtype.py                     # about ten minutes on two cores
    python scripts/bench_dtype.py --batches 8 --contexts 128 --rounds 5

Both sides answer every case in turn, several rounds in one session, on the random model of `bench_engine.py`.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench_workers import Case, Worker, cpu_name, engine_worker, limits_worker
from rich.box import SIMPLE_HEAD
from rich.table import Table

from splash_jax.files import check_target, write_text
from splash_jax.progress import make_console

console = make_console()
DTYPES = ("float32", "bfloat16")


def main() -> None:
    args = _arguments()
    check_target(args.json)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        with Worker(limits_worker, folder) as measure:
            limits = measure.ask(None)
        console.print(
            f"{cpu_name()}, {os.cpu_count()} logical CPUs; memory {limits['bytes_per_s'] / 1e9:.1f} GB/s, float32 "
            f"matmul {limits['flops_per_s'] / 1e9:.0f} GFLOP/s (measured now)"
        )
        with (
            Worker(engine_worker, folder, 1, "tp", "float32") as a,
            Worker(engine_worker, folder, 1, "tp", "bfloat16") as b,
        ):
            rows = [_measure(Case(batch, context, args.new), (a, b), args.rounds)
                    for context in args.contexts for batch in args.batches]  # fmt: skip
    if args.json:
        write_text(args.json, json.dumps({"cpu": cpu_name(), **limits, "rows": rows}, indent=1) + "\n")
        console.print(f"written to {args.json}")
    title = "tokens/s of one device, medians of rounds; ratio: bfloat16 over float32, median (least to most)"
    columns = [f"{what}, {column}" for what in ("decode", "prefill") for column in ("float32", "bfloat16", "ratio")]
    table = Table("batch x context", *columns, title=title, box=SIMPLE_HEAD)
    for row in rows:
        cells = [f"{row['batch']} x {row['context']}"]
        for name in ("decode", "prefill"):
            cells += [f"{row[name][dtype]:.1f}" for dtype in DTYPES]
            cells.append("{:.2f} ({:.2f} to {:.2f})".format(*row[name]["ratio"]))
        table.add_row(*cells)
    console.print(table)


def _measure(case: Case, workers: tuple[Worker, Worker], rounds: int) -> dict[str, Any]:
    """Medians of both sides over all rounds, and of the rounds' ratios."""
    found: list[list[dict[str, Any]]] = [[worker.ask(case) for worker in workers] for _ in range(rounds)]
    rates = {
        "decode": [[case.batch / statistics.median(side["step_s"]) for side in pair] for pair in found],
        "prefill": [[side["prefill_tok_s"] for side in pair] for pair in found],
    }
    row: dict[str, Any] = {"batch": case.batch, "context": case.context}
    for name, pairs in rates.items():
        ratios = [b / a for a, b in pairs]
        row[name] = {dtype: statistics.median(pair[i] for pair in pairs) for i, dtype in enumerate(DTYPES)}
        row[name]["ratio"] = (statistics.median(ratios), min(ratios), max(ratios))
    console.print(f"{case.batch} x {case.context}: measured", style="dim")
    return row


def _arguments() -> argparse.Namespace:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32], help="requests at once, such as 1,8")
    parser.add_argument("--contexts", type=numbers, default=[128, 1024], help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=24, help="tokens to draw per request")
    parser.add_argument(
        "--rounds", type=int, default=3, choices=range(1, 100), metavar="N", help="times to ask each side"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
