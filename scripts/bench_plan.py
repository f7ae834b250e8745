"""What a switch takes on the host before its step: the plan, the page pool after it, and the maps. No devices.

python scripts/bench_plan.py                                      # DeepSeek-V3.2, 16 x 131,008 tokens on 8 ranks
python scripts/bench_plan.py --model glm-5.3 --hardware h200 --batch 256 --context 8192
"""

import argparse
import time
from itertools import pairwise, permutations

from rich.table import Table

from splash_jax.cost import load_hardware
from splash_jax.kv import PagePool, filled_pool
from splash_jax.ownership import plan_switch
from splash_jax.preflight.case import draw_case
from splash_jax.progress import make_console
from splash_jax.runtime.transfer import make_maps


def main() -> None:
    args = _arguments()
    case = draw_case(
        args.model, load_hardware(args.hardware), num_devices=args.devices, layouts=tuple(args.layouts.split(",")),
        batch=args.batch, context=args.context, prefill_tokens=8192, block_size=64, memory_fraction=0.9,
    )  # fmt: skip
    table = Table("switch", box=None, pad_edge=False)
    for name in ("pages", "plan ms", "pool ms", "maps ms"):
        table.add_column(name, justify="right")
    for src, dst in permutations(case.layouts, 2):
        now = filled_pool(src, case.shapes.kv, case.pages(src), [case.context] * case.batch).manifest()
        route = case.engine_route(src, dst)
        times: list[list[float]] = []
        for _ in range(args.runs):
            clock = [time.perf_counter()]
            plan = plan_switch(now, dst, pages_per_rank=case.pages(dst), state=case.state)
            clock.append(time.perf_counter())
            PagePool.adopt(plan.after)
            clock.append(time.perf_counter())
            if not route.moves_nothing:
                make_maps(route, plan.kv)
            clock.append(time.perf_counter())
            times.append([1e3 * (b - a) for a, b in pairwise(clock)])
        best = [f"{min(each):.1f}" for each in zip(*times, strict=True)]
        table.add_row(f"{src} -> {dst}", f"{case.pages(src):,} -> {case.pages(dst):,}", *best)
    console = make_console()
    console.print(table)
    console.print(f"best of {args.runs}, one core of this machine")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deepseek-v3.2", help="a name in configs/models")
    parser.add_argument("--hardware", default="b200", help="a name in configs/hardware")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--layouts", default="tp,dp,cp,dop")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=131072 - 64)
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
