"""One question to a machine: this model, these layouts, this batch. Everything here follows without compiling."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from pathlib import Path

import jax.numpy as jnp

from splash_jax.configs import config_file, config_names
from splash_jax.cost import Hardware
from splash_jax.engine import EngineConfig
from splash_jax.engine.build import make_buckets
from splash_jax.engine.limits import check_step
from splash_jax.errors import ConfigError
from splash_jax.files import read_text
from splash_jax.kv import filled_pool
from splash_jax.layouts import make_layout
from splash_jax.layouts.specs import check_heads
from splash_jax.models.config import ModelConfig, read_model_config, serving_dtype
from splash_jax.models.deepseek_v3_weights import layer_kind
from splash_jax.ownership import (
    Bucket,
    KVShape,
    Layout,
    StateBytes,
    SwitchPlan,
    footprint,
    pages_that_fit,
    plan_switch,
    switch_buckets,
)
from splash_jax.ownership.manifest import owner_pages_needed
from splash_jax.runtime import Route, Shapes, make_route, state_bytes
from splash_jax.runtime.shapes import attention_kernels
from splash_jax.runtime.transfer import exact_route

STEPS = ("decode", "prefill")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on `num_devices` GPUs of a kind, with `batch` requests of `context` tokens live."""

    name: str  # of the model
    model: ModelConfig
    hardware: Hardware
    shapes: Shapes
    layouts: tuple[Layout, ...]
    buckets: Mapping[Layout, Mapping[str, Bucket]]  # per step
    state: StateBytes
    batch: int
    context: int
    prefill_tokens: int  # prompt rows of a prefill step, beside one row of every request
    budget: int  # bytes per rank for everything
    reserve: int
    compiled_kinds: tuple[str, ...]  # of layers: programs are compiled for these

    @property
    def mesh_sizes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self.layouts[0].axes}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of every layer, in order."""
        return tuple(layer_kind(self.model, i) for i in range(self.model.num_layers))

    @cached_property
    def needed(self) -> dict[Layout, int]:
        """Pages that the fullest rank needs for the batch, each request's next token included."""
        kv, held = self.shapes.kv, {str(i): (i % self.layouts[0].size, self.context + 1) for i in range(self.batch)}
        return {layout: max(owner_pages_needed(kv, layout, held)) for layout in self.layouts}

    @cached_property
    def fitting(self) -> dict[Layout, int]:
        """Pages that the budget leaves (Eq. 1, 5); 0 where weights and transit alone do not fit."""
        found = {}
        for layout in self.layouts:
            try:
                size = self.shapes.kv.page_size
                found[layout] = pages_that_fit(
                    self.state, layout, page_size=size, budget=self.budget, reserve=self.reserve
                )
            except ConfigError:
                found[layout] = 0
        return found

    def pages(self, layout: Layout) -> int:
        """Pages that programs are compiled for: what fits, or what the batch needs where that is more."""
        return max(self.fitting[layout], self.needed[layout])

    def lacks(self, layout: Layout) -> int:
        """Bytes per rank that lack for the batch in a layout; 0 where it fits."""
        held = footprint(self.state, layout, pages=self.needed[layout], page_size=self.shapes.kv.page_size)
        return max(0, held.total + self.reserve - self.budget)

    def plan(self, src: Layout, dst: Layout) -> SwitchPlan:
        """The switch of the whole batch."""
        pool = filled_pool(src, self.shapes.kv, self.pages(src), [self.context] * self.batch)
        return plan_switch(pool.manifest(), dst, pages_per_rank=self.pages(dst), state=self.state)

    @cached_property
    def switches(self) -> dict[tuple[Layout, Layout], tuple[SwitchPlan, Route]]:
        """Every directed switch: its plan, and the route with room for exactly that plan."""
        found = {}
        for src, dst in permutations(self.layouts, 2):
            plan = self.plan(src, dst)
            found[src, dst] = plan, exact_route(self.shapes, plan)
        return found

    def engine_route(self, src: Layout, dst: Layout) -> Route:
        """The route that an engine compiles ahead, with room for any batch that these pools can hold."""
        plan, _ = self.switches[src, dst]
        return make_route(self.shapes, src, dst, self.pages(src), self.pages(dst), plan.weights)


def read_model(name: str) -> ModelConfig:
    """A model by its name in `configs/models`, or from a folder with a `config.json`."""
    folder = Path(os.path.expanduser(name))
    if (folder / "config.json").exists():
        return read_model_config(folder)
    if name not in config_names("models"):
        raise ConfigError(
            f"no model {name!r}: neither a folder with a config.json nor one of {', '.join(config_names('models'))}."
        )
    path = config_file("models", name)
    return ModelConfig.from_dict(tomllib.loads(read_text(path))["config"], str(path))


def draw_case(
    model: str,
    hardware: Hardware,
    *,
    num_devices: int,
    layouts: tuple[str, ...],
    batch: int,
    context: int,
    prefill_tokens: int,
    block_size: int,
    memory_fraction: float,
    dtype: str = "auto",
    attention_backend: str = "xla",
    kinds: tuple[str, ...] = (),
    config: ModelConfig | None = None,
) -> Case:
    """Check a question and derive its sizes.

    `kinds` of layers are compiled, all that the model has by default. `config` is the model when the caller has it.
    """
    cfg = config or read_model(model)
    if context > cfg.max_position_embeddings:
        raise ConfigError(f"context {context} is more than the model's {cfg.max_position_embeddings} tokens.")
    if block_size > cfg.max_position_embeddings:
        raise ConfigError(f"block_size {block_size} is more than the model's context {cfg.max_position_embeddings}.")
    layouts = tuple(dict.fromkeys(layouts))
    settings = EngineConfig(
        model=Path(model), num_devices=num_devices, layout=layouts[0], layouts=layouts, dtype=dtype,
        attention_backend=attention_backend, max_num_seqs=batch, max_num_batched_tokens=prefill_tokens,
        decode_buckets=(batch,), block_size=block_size,
    )  # fmt: skip
    made = tuple(make_layout(name, settings.mesh_shape) for name in layouts)
    check_heads(made[0], cfg.num_heads)
    every = tuple(dict.fromkeys(layer_kind(cfg, i) for i in range(cfg.num_layers)))
    if strange := [kind for kind in kinds if kind not in every]:
        raise ConfigError(f"{model} has no layers of kind {', '.join(strange)}; it has: {', '.join(every)}.")
    served = serving_dtype(cfg, dtype)
    row = (cfg.kv_lora_rank + cfg.qk_rope_head_dim) * jnp.dtype(served).itemsize
    kv = KVShape(page_size=block_size, interleave=settings.interleave, bytes_per_token=row)
    backend, chip = attention_kernels(attention_backend, hardware.name)
    shapes = Shapes(
        model=cfg, dtype=served, kv=kv, max_model_len=context + block_size, slots=batch, penalties=False,
        attention_backend=backend, attention_chip=chip,
    )  # fmt: skip
    buckets = {layout: make_buckets(settings, layout, prefill_tokens, backend) for layout in made}
    for layout in made:
        check_step(layout, buckets[layout][-1], shapes, batch, prefill_tokens)
    return Case(
        name=model,
        model=cfg,
        hardware=hardware,
        shapes=shapes,
        layouts=made,
        buckets={layout: dict(zip(STEPS, switch_buckets(found), strict=True)) for layout, found in buckets.items()},
        state=state_bytes(cfg, served, num_devices, kv),
        batch=batch,
        context=context,
        prefill_tokens=prefill_tokens,
        budget=int(hardware.hbm_bytes * memory_fraction),
        reserve=0,
        compiled_kinds=kinds or every,
    )
