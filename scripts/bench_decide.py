"""How long a decision takes: `decide` on a snapshot, and taking the snapshot, over the number of running requests.

    python scripts/bench_decide.py
    python scripts/bench_decide.py --requests 256,4096 --repeat 200

Four layouts of eight ranks, a switch quoted to and back from each, requests of random lengths, a cost model as simple
as a sum: what a snapshot takes here is the policy's own part. Least and median of the repeats, and the device's name.
"""

import argparse
import platform
import time
from collections.abc import Mapping

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from splash_jax.cost import Load, Room
from splash_jax.kv import PagePool
from splash_jax.layouts import make_layout
from splash_jax.ownership import KVShape, Layout
from splash_jax.progress import make_console
from splash_jax.scheduler import Memory, Observer, PolicyConfig, Request, SamplingParams, Scheduler, SwitchCost, decide
from splash_jax.simulate import buckets_of


class Flat:
    """Prices that cost nothing to find."""

    def __init__(self, layouts: tuple[Layout, ...]) -> None:
        self._steps = {one: 0.03 + 0.001 * i for i, one in enumerate(layouts)}
        self._switches = {
            one: {other: SwitchCost(0.01, 0.001, 8) for other in layouts if other != one} for one in layouts
        }

    def step_seconds(self, load: Load) -> Mapping[Layout, float]:
        return self._steps

    def switch_seconds(self, src: Layout, load: Load) -> Mapping[Layout, SwitchCost]:
        return self._switches[src]


def measure(requests: int, repeat: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of `decide` and of taking its snapshot, [repeat] each."""
    layouts = tuple(make_layout(role, {"rank": 8}) for role in ("tp", "cp", "dp", "dop"))
    kv, rng = KVShape(page_size=64, interleave=64, bytes_per_token=576), np.random.default_rng(0)
    pages = dict.fromkeys(layouts, requests * 130)
    pool = PagePool(layouts[2], kv, pages[layouts[2]])
    scheduler = Scheduler(requests, buckets_of(layouts, requests, 8192, 64).__getitem__)
    for i in range(requests):
        length = int(rng.integers(100, 8000))
        request = Request(
            name=str(i), prompt_ids=[0] * length, params=SamplingParams(), seed=0, max_total=length + 4096,
            computed=length + 10, output_ids=[0] * 11,
        )  # fmt: skip
        pool.add(request.name, i % 8)
        pool.grow(request.name, request.computed)
        scheduler.running.append(request)
    observer = Observer(costs=Flat(layouts), room=Room(kv, pages), slots=requests)
    memory, policy = Memory(), PolicyConfig()
    decided, observed = np.empty(repeat), np.empty(repeat)
    for n in range(repeat):
        began = time.perf_counter()
        snapshot = observer.snapshot(scheduler, pool, step=n, time=n * 0.03, policy=policy, memory=memory)
        taken = time.perf_counter()
        decision = decide(snapshot)
        decided[n], observed[n] = time.perf_counter() - taken, taken - began
        memory = decision.memory
    return decided, observed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,256,4096", help="numbers of running requests")
    parser.add_argument("--repeat", type=int, default=300)
    args = parser.parse_args()
    table = Table(title=f"Microseconds on {platform.processor() or platform.machine()}", box=SIMPLE_HEAD)
    for column in ("requests", "decide, least", "median", "snapshot, least", "median"):
        table.add_column(column, justify="right")
    for requests in map(int, args.requests.split(",")):
        found = [(1e6 * part.min(), 1e6 * np.median(part)) for part in measure(requests, args.repeat)]
        table.add_row(str(requests), *(f"{value:.0f}" for pair in found for value in pair))
    make_console().print(table)


if __name__ == "__main__":
    main()
