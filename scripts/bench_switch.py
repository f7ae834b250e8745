"""What a switch adds to a step: target-ready, blocking and splash in every direction, in one session.

    python scripts/bench_switch.py                                  # virtual CPU devices, or the GPUs that are there
    python scripts/bench_switch.py --processes 2 --devices 2        # two processes, each pinned to one core
    python scripts/bench_switch.py --csv switch.csv --plot switch.png

The three ways take turns within every round, and each run starts from the same requests in the source layout. Random
weights and histories: no time depends on what they say.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench_workers import CONFIG
from switch_plot import draw
from switch_report import Row, notes, show, summarise, write_csv
from switch_setup import Job

from splash_jax.cli.process import command
from splash_jax.files import check_target
from splash_jax.platforms import on_cpu
from splash_jax.progress import make_console

# Embedding and head are no part of a switch, and layers of one kind need half the programs.
SMALLER = {"vocab_size": 4096, "first_k_dense_replace": 0}


def main() -> None:
    args = _arguments()
    check_target(args.csv)
    check_target(args.plot)
    console = make_console(width=max(make_console().width, 150))
    pinned = args.processes > 1 and on_cpu()
    rows: list[Row] = []
    device = "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or _random_model(Path(scratch) / "model", args)
        for devices in args.devices:
            found = measure(_job(args, model, devices, Path(scratch)), pinned)
            device = found["device"]
            mine = summarise(found, devices, args.processes, pinned)
            rows += mine
            if args.csv:
                write_csv(rows, args.csv)
            for step in args.steps:
                show(console, [row for row in mine if row.step == step], device)
    if args.plot:
        draw(rows, args.plot, device)
    for line in notes(rows, device, pinned):
        console.print(f"  {line}", soft_wrap=True)
    if args.csv:
        console.print(f"written to {args.csv}", soft_wrap=True)
    if args.plot:
        console.print(f"drawn in {args.plot}", soft_wrap=True)


def measure(job: Job, pinned: bool) -> dict[str, Any]:
    """Run a job in as many processes as it says."""
    environment = dict(os.environ)
    if on_cpu():
        environment |= {"JAX_PLATFORMS": "cpu", "NPROC": "32"}  # collectives deadlock with few threads
    cores = sorted(os.sched_getaffinity(0))
    worker = str(Path(__file__).with_name("switch_worker.py"))
    processes = []
    for i in range(job.processes):
        own = replace(job, process=i, core=cores[i % len(cores)] if pinned else None)
        processes.append(subprocess.Popen([sys.executable, worker, json.dumps(asdict(own))], env=environment))
    try:
        while any(process.poll() is None for process in processes) and not any(p.returncode for p in processes):
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()  # whoever is left waits for one that failed
    if codes := [process.returncode for process in processes if process.returncode]:
        raise SystemExit(f"a worker ended with exit status {codes[0]}; its words, if it had any, are above.")
    return json.loads(Path(job.answer).read_text())


def _job(args: argparse.Namespace, model: Path, devices: int, scratch: Path) -> Job:
    return Job(
        model=str(model),
        layouts=tuple(args.layouts),
        steps={step: args.steps[step] for step in args.steps},
        devices=devices,
        batch=args.batch,
        context=args.context,
        runs=args.runs,
        dtype=args.dtype,
        answer=str(scratch / f"answer{devices}.json"),
        processes=args.processes,
        address=f"127.0.0.1:{_free_port()}" if args.processes > 1 else "",
    )


def _free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def _random_model(folder: Path, args: argparse.Namespace) -> Path:
    from splash_jax.models.random_checkpoint import write_random_checkpoint

    longest = max(CONFIG["max_position_embeddings"], args.context + max(args.steps.values()))
    return write_random_checkpoint(
        folder, CONFIG | SMALLER | {"num_hidden_layers": args.layers, "max_position_embeddings": longest}
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4])
    parser.add_argument("--processes", type=int, default=1, help="on CPU each is pinned to one core")
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=["tp", "dp", "cp", "dop"])
    parser.add_argument("--batch", type=int, default=8, help="requests")
    parser.add_argument("--context", type=int, default=1024, help="tokens that each of them has stored")
    parser.add_argument("--decode", action="store_true", help="a step of one row per request")
    parser.add_argument("--prefill", type=int, metavar="ROWS", help="a step of ROWS prompt rows per request")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=8, help="of the random model")
    parser.add_argument("--model", type=Path, help="a checkpoint directory instead of the random model")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    args.steps = {"decode": 1} if args.decode else {}
    if args.prefill:
        args.steps["prefill"] = args.prefill
    args.steps = args.steps or {"decode": 1, "prefill": 16}
    for devices in args.devices:
        if devices % args.processes:
            parser.error(f"--devices {devices} cannot be dealt to --processes {args.processes} evenly.")
    return args


if __name__ == "__main__":
    with command():
        main()
