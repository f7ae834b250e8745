"""A batch of requests whose histories lie on the devices, and the programs that step and switch it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


class Resident:
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

    def batch(self, step: str, layout: Any) -> tuple[Any, Any, list[int]]:
        """The step's bucket and batch in a layout, and the rows that it draws. It stores the same tokens each time."""
        from splash_jax.runtime import Draw, Work, build_batch

        rows, bucket = self.job.steps[step], self.bucket(layout, step)
        works = [
            Work(name=str(i), slot=i, start=self.job.context, ids=ids[:rows], draw=Draw())
            for i, ids in enumerate(self.tokens)
        ]
        batch, places = build_batch(self.blueprint.shapes, layout, bucket, self.pool, works)
        return bucket, batch, list(places.sampled.values())
