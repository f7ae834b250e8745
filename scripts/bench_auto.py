"""A draining rollout on the real engine: layout "auto" beside every fixed layout, in turn, in one run.

    NPROC=32 python scripts/bench_auto.py --hardware here.toml   # a profile that `splash calibrate` wrote
    NPROC=32 python scripts/bench_auto.py                        # calibrates first

One engine runs all: a fixed layout is its policy pinned. The budget per rank leaves layouts different room for
histories, so what one admits another queues. The times are this machine's: virtual CPU devices share its cores.
"""

import argparse
import math
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table

from splash_jax import LLM, SamplingParams, small_model
from splash_jax.calibrate import calibrate, profile_toml
from splash_jax.cli.process import command
from splash_jax.cli.values import print_table
from splash_jax.engine import EngineConfig, draw_up
from splash_jax.files import check_target, write_csv, write_text
from splash_jax.ownership.footprint import IN_TRANSIT
from splash_jax.progress import make_console

console = make_console()
LAYOUTS = ("tp", "dp", "cp", "dop")


def main() -> None:
    args = _arguments()
    check_target(args.csv)
    check_target(Path("calibrated.toml") if args.hardware is None else None)
    jax.config.update("jax_num_cpu_devices", args.devices)
    profile = args.hardware
    if profile is None:
        profile = Path("calibrated.toml")
        found = calibrate(small_model(), num_devices=args.devices, name="calibrated", max_num_seqs=args.slots)
        write_text(profile, profile_toml(found))
        fit = found.fit
        console.print(
            f"calibrated in {found.seconds:.0f} s: steps predicted within {fit.median_error:.1%} (median), they vary "
            f"by {fit.noise:.1%}; regret {fit.regret:.1%}"
        )
    llm = LLM(small_model(), layout="auto", hardware=profile, **_settings(args), device_memory_bytes=_budget(args))
    prompts, params = _rollout(args)
    console.print(
        f"{args.requests} requests, {sum(p.max_tokens or 0 for p in params)} tokens to draw, longest "
        f"{max(p.max_tokens or 0 for p in params)}; {args.slots} at once where they fit"
    )
    runs: dict[str, list[dict[str, Any]]] = {}
    for n in range(args.rounds + 1):  # the first warms up, with a part of the requests
        for name in (*LAYOUTS, "auto") if n % 2 else ("auto", *reversed(LAYOUTS)):
            few = len(prompts) if n else args.slots
            run = _run(llm, name, prompts[:few], params[:few])
            if n:
                runs.setdefault(name, []).append(run)
    if args.csv:
        rows = [{"layout": name} | run for name, each in runs.items() for run in each]
        write_csv(args.csv, rows[0], rows)
    _print(llm, runs)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "num_devices": args.devices, "layouts": LAYOUTS, "max_num_seqs": args.slots, "max_model_len": args.context,
        "penalties": False, "scoring": False, "skip_tokenizer_init": True,
    }  # fmt: skip


def _budget(args: argparse.Namespace) -> int:
    """Bytes per rank with room for `--room` longest requests where every rank holds all histories."""
    blueprint = draw_up(EngineConfig(model=small_model(), **_settings(args)))
    state, kv = blueprint.state, blueprint.shapes.kv
    pages = args.room * math.ceil(args.context / kv.page_size)
    fixed = state.common + state.projections * (state.num_layers + 1)  # whole projections: dp and cp have room for one
    return fixed + pages * kv.page_size * kv.bytes_per_token * (state.num_layers + IN_TRANSIT)


def _rollout(args: argparse.Namespace) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 8 to 64 tokens, lengths with a heavy tail (lognormal), all there at the start."""
    rng = np.random.default_rng(args.seed)
    prompts = [rng.integers(5, 900, int(n)).tolist() for n in rng.integers(8, 65, args.requests)]
    lengths = np.clip(rng.lognormal(math.log(args.median), 1.0, args.requests), 4, args.context - 64).astype(int)
    return prompts, [SamplingParams(max_tokens=int(n), temperature=0.0, ignore_eos=True) for n in lengths]


def _run(llm: LLM, name: str, prompts: list[list[int]], params: list[SamplingParams]) -> dict[str, Any]:
    llm.set_policy(pin=None if name == "auto" else name)
    if name != "auto":
        llm.generate([prompts[0]], SamplingParams(max_tokens=2, ignore_eos=True))  # goes there
    first, began = len(llm.records), time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    records = llm.records[first:]
    drawn = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "seconds": seconds,
        "tokens_per_s": drawn / seconds,
        "steps": len(records),
        "most_running": max(sum(r.running_by_home) for r in records),
        "queued_steps": sum(r.waiting > 0 for r in records),
        "switches": sum(r.switch is not None for r in records),
        "layouts": " ".join(f"{k}:{v}" for k, v in Counter(r.layout for r in records).most_common()),
    }


def _print(llm: LLM, runs: dict[str, list[dict[str, Any]]]) -> None:
    medians = {name: statistics.median(run["seconds"] for run in each) for name, each in runs.items()}
    best = min(value for name, value in medians.items() if name != "auto")
    worst = max(value for name, value in medians.items() if name != "auto")
    table = Table("layout", "seconds", "over the best fixed", "steps", "most at once", "steps with a queue", "switches",
                  "steps in each", box=None, pad_edge=False)  # fmt: skip
    for name, each in runs.items():
        spread = f"{min(r['seconds'] for r in each):.1f} to {max(r['seconds'] for r in each):.1f}"
        last = each[-1]
        table.add_row(
            name, f"{medians[name]:.1f} ({spread})", f"{medians[name] / best:.3f}", str(last["steps"]),
            str(last["most_running"]), str(last["queued_steps"]), str(last["switches"]), last["layouts"],
        )  # fmt: skip
    print_table(console, table)
    console.print(
        f"auto: {medians['auto'] / best:.3f} of the best fixed, {worst / medians['auto']:.2f} x faster than the worst"
    )
    if why := llm.engine.pilot.observer.residuals.distrust() if llm.engine.pilot else "":
        console.print(f"the profile is not obeyed: {why}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", type=Path, help="a profile; without one this machine is calibrated")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--slots", type=int, default=32, help="requests that run at once where they fit")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--room", type=int, default=2, help="longest requests that fit the layout with least room")
    parser.add_argument("--median", type=float, default=40, help="tokens drawn by the median request")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    with command():
        main()
