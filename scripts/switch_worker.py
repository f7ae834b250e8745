"""One process of a measurement of switches: target-ready, blocking and splash in turn, on the library's own pieces.

Started by `bench_switch.py`, alone or beside others, with a job in JSON as its argument.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODES = ("ready", "blocking", "splash")
PAGE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to measure, and which process of how many this is."""

    model: str
    layouts: tuple[str, ...]
    steps: dict[str, int]  # "decode" or "prefill" -> rows of every request in the step
    devices: int  # of all processes
    batch: int
    context: int
    runs: int
    dtype: str
    answer: str  # file that the first process writes
    processes: int = 1
    process: int = 0
    address: str = ""
    core: int | None = None  # the only one that this process may use


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One run. Seconds of the clock (the slowest process) and of all cores together, until everything is there."""

    step: str
    src: str
    dst: str
    mode: str
    round: int
    wall: float
    cpu: float
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
    """A batch of requests whose histories lie on the devices, and the programs that step and switch it."""

    def __init__(self, job: Job) -> None:
        import jax
        import numpy as np
        from jax.sharding import NamedSharding

        from splash_jax.engine import EngineConfig, draw_up
        from splash_jax.engine.build import load_state, open_checkpoint
        from splash_jax.engine.platform import use_compilation_cache
        from splash_jax.kv import PagePool
        from splash_jax.layouts import attention_mesh, pool_spec
        from splash_jax.ownership.footprint import IN_TRANSIT
        from splash_jax.runtime import Programs

        self.job = job
        rows = max(job.steps.values())
        tile = min(PAGE, rows)
        most_rows = job.devices * -(-job.batch // job.devices) * -(-rows // tile) * tile
        pages = job.batch * -(-(job.context + rows) // PAGE) + 1
        config: dict[str, Any] = {
            "model": Path(job.model),
            "num_devices": job.devices,
            "layouts": tuple(dict.fromkeys(("tp", *job.layouts))),  # histories are laid down in tp
            "dtype": job.dtype,
            "max_num_seqs": job.batch,
            "max_model_len": job.context + rows,
            "max_num_batched_tokens": most_rows,
            "prefill_tile": tile,
            "decode_buckets": (job.batch,),
            "block_size": PAGE,
            "scoring": False,
            "penalties": False,
        }
        state = draw_up(EngineConfig(**config)).state
        page_bytes = PAGE * state.kv_per_token
        budget = state.common + state.projections * (state.num_layers + 1)
        budget += pages * page_bytes * (state.num_layers + IN_TRANSIT)
        self.blueprint = draw_up(EngineConfig(**config, device_memory_bytes=budget))
        use_compilation_cache(self.blueprint.config.compilation_cache_dir)
        mesh, shapes = attention_mesh({"rank": job.devices}), self.blueprint.shapes
        self.programs = Programs(mesh, shapes)
        self.state = load_state(self.blueprint, mesh, open_checkpoint(self.blueprint), None)
        sharding, rng = NamedSharding(mesh, pool_spec(self.state.layout)), np.random.default_rng(0)
        for i, pool in enumerate(self.state.pools):
            # No time depends on what a history says, so it is drawn: in tp, the same on every rank.
            same = rng.normal(size=(1, *pool.shape[1:])).astype(pool.dtype)
            self.state.pools[i] = jax.make_array_from_callback(pool.shape, sharding, lambda _, same=same: same)
        self.pool = PagePool(self.state.layout, shapes.kv, self.state.pages)
        for i in range(job.batch):
            self.pool.add(str(i), i % job.devices)
            self.pool.grow(str(i), job.context + rows)
        self.tokens = rng.integers(3, shapes.model.vocab_size, (job.batch, rows)).astype(np.int32)

    def prepare(self, directions: list[tuple[str, str]]) -> None:
        """Compile what the directions need."""
        from splash_jax.models.deepseek_v3_weights import layer_kind
        from splash_jax.runtime import StepKey, SwitchKey

        it, keys = self.blueprint, []
        kinds = [layer_kind(it.model, i) for i in range(it.model.num_layers)]
        for src in it.layouts.values():
            for dst in it.layouts.values():
                if src == dst or it.route(src, dst).moves_nothing:
                    continue
                keys.append(SwitchKey(route=it.route(src, dst)))
                if it.route(src, dst).gathers:
                    keys.append(SwitchKey(route=it.route(src, dst), more=True))
                if (str(src), str(dst)) in directions:
                    for kind in dict.fromkeys(kinds[:-1]):
                        keys += [
                            SwitchKey(route=it.route(src, dst), kind=kind, bucket=self.bucket(dst, step))
                            for step in self.job.steps
                        ]
        for dst in {it.layouts[dst] for _, dst in directions}:
            for step in self.job.steps:
                for part in ("embed", *dict.fromkeys(kinds), "head"):
                    keys.append(StepKey(part=part, layout=dst, bucket=self.bucket(dst, step), pages=it.pages[dst]))
        self.programs.prepare(keys)

    def bucket(self, layout: Any, step: str) -> Any:
        return self.blueprint.buckets[layout][-2 if step == "decode" else -1]

    def wait(self) -> None:
        """Until all state is there, in every process."""
        import jax

        layers = [layer["moved"] for layer in self.state.weights["layers"]]
        jax.block_until_ready((self.state.pools, self.state.sampler, layers))
        if self.job.processes > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("ready")

    def switch(self, dst: str, mode: str) -> Any:
        """A switch from where the state is, ready to go; the pages are as after it."""
        from splash_jax.kv import PagePool
        from splash_jax.ownership import plan_switch
        from splash_jax.runtime import SwitchMode, prepare_switch

        it, layout = self.blueprint, self.blueprint.layouts[dst]
        plan = plan_switch(self.pool.manifest(), layout, pages_per_rank=it.pages[layout], state=it.state)
        self.pool = PagePool.adopt(plan.after)
        return prepare_switch(self.programs, plan, it.route(plan.before.layout, layout), SwitchMode(mode))

    def go(self, layout: str) -> None:
        """Move everything to a layout, nothing timed."""
        from splash_jax.runtime import move_all

        if str(self.state.layout) != layout:
            move_all(self.programs, self.state, self.switch(layout, "blocking"))

    def run(self, step: str, src: str, dst: str, mode: str) -> tuple[tuple[float, float, float], Any, Any]:
        """One step in `dst` that starts from `src`: (wall, cpu, planning), what it drew, and the switch."""
        import jax

        from splash_jax.runtime import Draw, Work, build_batch, move_all, run_step

        self.go(src)
        begun = time.perf_counter()
        switch = self.switch(dst, "splash" if mode == "ready" else mode)
        planning = time.perf_counter() - begun
        rows, it = self.job.steps[step], self.blueprint
        bucket = self.bucket(switch.route.dst, step)
        works = [
            Work(name=str(i), slot=i, start=self.job.context, ids=ids[:rows], draw=Draw())
            for i, ids in enumerate(self.tokens)
        ]
        batch, places = build_batch(it.shapes, switch.route.dst, bucket, self.pool, works)
        if mode == "ready":
            move_all(self.programs, self.state, switch)
        self.wait()
        cpu, begun = time.process_time(), time.perf_counter()
        results = run_step(self.programs, self.state, bucket, batch, switch=None if mode == "ready" else switch)
        jax.block_until_ready((results, self.state.pools))
        wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
        return (wall, cpu, planning), (results.drawn, list(places.sampled.values())), switch

    def measure(self) -> dict[str, Any]:
        """Every direction in every mode once untimed and compared, then `runs` rounds over all of them."""
        directions = [(src, dst) for src in self.job.layouts for dst in self.job.layouts if src != dst]
        self.prepare(directions)
        cases = [(step, src, dst) for step in self.job.steps for src, dst in directions]
        told = [self.compare(*case) for case in cases]
        self.programs.sealed = True
        timed: list[tuple[float, float, float]] = []
        names: list[tuple[str, str, str, str, int]] = []
        for turn in range(self.job.runs):
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

    def gathered(self, names: list[Any], timed: list[tuple[float, float, float]]) -> list[dict[str, Any]]:
        """Of all processes the slowest clock, the sum of CPU seconds, and the longest planning."""
        import numpy as np
        from jax.experimental import multihost_utils

        every = np.asarray(multihost_utils.process_allgather(np.asarray(timed, np.float32))).reshape(-1, len(timed), 3)
        wall, cpu, planning = every[..., 0].max(0), every[..., 1].sum(0), every[..., 2].max(0)
        return [
            asdict(Timed(
                step=step, src=src, dst=dst, mode=mode, round=turn,
                wall=float(wall[i]), cpu=float(cpu[i]), planning=float(planning[i]),
            ))
            for i, (step, src, dst, mode, turn) in enumerate(names)
        ]  # fmt: skip


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
    sys.stdout.flush()
    os._exit(0)  # after a distributed run an interpreter may hang in its own shutdown


if __name__ == "__main__":
    main()
