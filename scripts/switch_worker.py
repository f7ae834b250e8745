"""One process of a measurement of switches: target-ready, blocking and splash in turn, on the library's own pieces.

Started by `bench_switch.py`, alone or beside others, with a job in JSON as its argument.
"""

import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from switch_setup import Job, Resident

MODES = ("ready", "blocking", "splash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One run, until everything is there: seconds of the clock (the slowest process), of all processes' cores."""

    step: str
    src: str
    dst: str
    mode: str
    round: int
    wall: float
    cpu: float
    foreign: float  # core seconds that other programs took on the cores this may use
    planning: float  # before the clock: the plan, its maps and their way to the devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """What a switch does, whatever its mode."""

    step: str
    src: str
    dst: str
    weights: str  # primitive
    kv: str  # primitive
    bytes: int  # received by the busiest rank, all layers, padding not counted
    largest_difference: float  # of a drawn token's log-probability between the three; NaN: tokens differ


class Bench:
    """Runs of one job."""

    def __init__(self, job: Job) -> None:
        self.job, self.it = job, Resident(job)

    def run(self, step: str, src: str, dst: str, mode: str) -> tuple[tuple[float, ...], Any, Any]:
        """One step in `dst` that starts from `src`: (wall, cpu, foreign, planning), what it drew, and the switch."""
        import jax

        from splash_jax.runtime import move_all, run_step

        it = self.it
        it.go(src)
        begun = time.perf_counter()
        switch = it.switch(dst, "splash" if mode == "ready" else mode)
        planning = time.perf_counter() - begun
        bucket, batch, rows = it.batch(step, switch.route.dst)
        if mode == "ready":
            move_all(it.programs, it.state, switch)
        it.wait()
        busy, cpu, begun = busy_seconds(), time.process_time(), time.perf_counter()
        results = run_step(it.programs, it.state, bucket, batch, switch=None if mode == "ready" else switch)
        jax.block_until_ready((results, it.state.pools))
        wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
        return (wall, cpu, busy_seconds() - busy - cpu, planning), (results.drawn, rows), switch

    def measure(self) -> dict[str, Any]:
        """Every direction in every mode once untimed and compared, then `runs` rounds over all of them."""
        directions = [(src, dst) for src in self.job.layouts for dst in self.job.layouts if src != dst]
        say(self.job, "compiling")
        self.it.prepare(directions)
        meet(self.job)
        cases = [(step, src, dst) for step in self.job.steps for src, dst in directions]
        told = [self.compare(*case) for case in cases]
        self.it.programs.sealed = True
        timed: list[tuple[float, ...]] = []
        names: list[tuple[str, str, str, str, int]] = []
        for turn in range(self.job.runs):
            say(self.job, f"round {turn + 1} of {self.job.runs}")
            order = MODES[turn % len(MODES) :] + MODES[: turn % len(MODES)]
            for case in cases:
                for mode in order:
                    timed.append(self.run(*case, mode)[0])
                    names.append((*case, mode, turn))
        return {"directions": [asdict(d) for d in told], "timed": self.gathered(names, timed)}

    def compare(self, step: str, src: str, dst: str) -> Direction:
        """One run in each mode: they must draw the same."""
        import numpy as np
        from jax.experimental import multihost_utils

        drawn, switch = [], None
        for mode in MODES:
            _, (found, rows), switch = self.run(step, src, dst, mode)
            tokens, logprobs = (np.asarray(multihost_utils.process_allgather(x, tiled=True)) for x in found)
            drawn.append((tokens[rows, 0], logprobs[rows, 0]))
        same = all((tokens == drawn[0][0]).all() for tokens, _ in drawn)
        difference = max(float(abs(logprobs - drawn[0][1]).max()) for _, logprobs in drawn)
        assert switch is not None
        return Direction(
            step=step,
            src=src,
            dst=dst,
            weights=switch.plan.weights.primitive,
            kv=switch.plan.kv.primitive,
            bytes=max(switch.plan.bytes_per_rank()),
            largest_difference=difference if same else float("nan"),
        )

    def gathered(self, names: list[Any], timed: list[tuple[float, ...]]) -> list[dict[str, Any]]:
        """Of all processes the slowest clock, the sum of CPU seconds, and the longest planning."""
        import numpy as np
        from jax.experimental import multihost_utils

        every = np.asarray(multihost_utils.process_allgather(np.asarray(timed, np.float32))).reshape(-1, len(timed), 4)
        combine = {"wall": np.max, "cpu": np.sum, "foreign": np.sum, "planning": np.max}
        values = {name: how(every[..., k], 0) for k, (name, how) in enumerate(combine.items())}
        return [
            asdict(Timed(
                step=step, src=src, dst=dst, mode=mode, round=turn, **{name: float(x[i]) for name, x in values.items()}
            ))
            for i, (step, src, dst, mode, turn) in enumerate(names)
        ]  # fmt: skip


def busy_seconds() -> float:
    """Core seconds that the cores which this process may use were busy so far, whoever used them. Ticks are 10 ms."""
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    # user nice system idle iowait irq softirq steal
    return sum(sum(int(line[i]) for i in (1, 2, 3, 6, 7, 8)) for line in lines if line[0] in mine) / 100


def meet(job: Job) -> None:
    """Wait for the other processes by files: CPU collectives give up after half a minute, compiling takes longer."""
    places = [Path(f"{job.answer}.{i}") for i in range(job.processes)]
    places[job.process].touch()
    while not all(place.exists() for place in places):
        time.sleep(0.1)


def say(job: Job, what: str) -> None:
    """Progress, by the first process."""
    if job.process == 0:
        print(f"{job.devices} devices: {what}", file=sys.stderr, flush=True)


def place() -> tuple[str, int]:
    """What this is measured on, in words, and how many cores this process may use."""
    import jax

    cores, device = len(os.sched_getaffinity(0)), jax.devices()[0]
    return (device.platform if device.platform == "cpu" else device.device_kind), cores


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    if job.core is not None:
        os.sched_setaffinity(0, {job.core})
    import jax

    from splash_jax.platforms import on_cpu

    each = job.devices // job.processes
    if on_cpu():
        jax.config.update("jax_num_cpu_devices", each)
    if job.processes > 1:
        mine = None if on_cpu() else list(range(job.process * each, (job.process + 1) * each))
        jax.distributed.initialize(job.address, job.processes, job.process, local_device_ids=mine)
    found = Bench(job).measure()
    found["device"], found["cores"] = place()
    if job.process == 0:
        Path(job.answer).write_text(json.dumps(found))
    if job.processes > 1:
        jax.distributed.shutdown()  # waits for all: who goes before the others ends them with an error


if __name__ == "__main__":
    code = 1
    try:
        main()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # after a distributed run an interpreter may hang in its own shutdown
