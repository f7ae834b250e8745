"""From settings to an engine's parts: everything is checked before any device memory is taken."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, permutations
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from splash_jax.engine.config import EngineConfig
from splash_jax.engine.limits import MOST_PROGRAMS, check_step
from splash_jax.engine.platform import (
    check_host_memory,
    free_memory,
    prepare_platform,
    room_on_devices,
    start_devices,
    use_compilation_cache,
)
from splash_jax.errors import ConfigError
from splash_jax.kv.store import empty_pools, pool_struct
from splash_jax.layouts import attention_mesh, pool_spec, weight_spec
from splash_jax.layouts.specs import check_heads
from splash_jax.models.checkpoint import Checkpoint
from splash_jax.models.config import ModelConfig, read_model_config, serving_dtype
from splash_jax.models.deepseek_v3_weights import layer_kind, model_leaves
from splash_jax.models.load import load_tree, open_weights
from splash_jax.models.params import Leaf, in_blocks
from splash_jax.ownership import (
    Bucket,
    Footprint,
    KVShape,
    Layout,
    StateBytes,
    footprint,
    pages_that_fit,
    switch_buckets,
)
from splash_jax.ownership.footprint import IN_TRANSIT
from splash_jax.ownership.plan import weight_move
from splash_jax.platforms import cpu_has_bfloat16
from splash_jax.runtime import (
    DeviceState,
    Programs,
    ResetKey,
    Shapes,
    StepKey,
    SwitchKey,
    SwitchMode,
    fresh_state,
    make_route,
    spread_programs,
)
from splash_jax.runtime.keys import Key, StepCheckKey, SwitchCheckKey
from splash_jax.runtime.shapes import NOWHERE, attention_kernels
from splash_jax.runtime.sizes import sampler_bytes, state_bytes
from splash_jax.runtime.transfer import Route, cut_route, least_transfer_bytes, map_widths

log = logging.getLogger("splash_jax")

CPU = "cpu"  # the kind of a CPU device, as JAX names it
AUTO_DTYPE = "auto"
DEFAULT_MOST_TOKENS = 1 << 18  # per rank, where nobody says how much memory there is

Progress = Callable[[str, int, int], None]  # what, done, in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """What follows from settings and a model's config alone: no weights, no devices."""

    config: EngineConfig
    model: ModelConfig
    shapes: Shapes
    layouts: Mapping[str, Layout]
    pages: Mapping[Layout, int]  # per rank
    buckets: Mapping[Layout, tuple[Bucket, ...]]
    state: StateBytes

    def route(self, src: Layout, dst: Layout) -> Route:
        """The route of a switch between two allowed layouts."""
        weights = weight_move(src, dst, self.state)
        return make_route(self.shapes, src, dst, self.pages[src], self.pages[dst], weights)

    def footprint(self, layout: Layout) -> Footprint:
        """What a rank holds in an allowed layout."""
        return footprint(self.state, layout, pages=self.pages[layout], page_size=self.shapes.kv.page_size)

    def directions(self) -> list[tuple[Layout, Layout]]:
        """The switches that serving may ask for."""
        if self.config.directions is None:
            return list(permutations(self.layouts.values(), 2))
        asked = dict.fromkeys((src, dst) for src, dst in self.config.directions)
        return list(dict.fromkeys((self.config.layout_of(src), self.config.layout_of(dst)) for src, dst in asked))

    def keys(self) -> Iterator[Key]:
        """Every program that serving can ask for."""
        kinds = [layer_kind(self.model, i) for i in range(self.model.num_layers)]
        layouts = list(self.layouts.values())
        for layout in layouts:
            for bucket in self.buckets[layout]:
                for part in ("embed", *dict.fromkeys(kinds), "head"):
                    yield StepKey(part=part, layout=layout, bucket=bucket, pages=self.pages[layout])
                if self.config.debug_checks:
                    yield StepCheckKey(layout=layout, bucket=bucket, pages=self.pages[layout])
            if self.config.scoring:
                yield StepKey(part="score", layout=layout, bucket=self.buckets[layout][-1], pages=self.pages[layout])
        if self.config.penalties:
            yield ResetKey()
        for src, dst in self.directions():
            route = self.route(src, dst)
            if route.moves_nothing:
                continue
            modes = self.config.switch_modes
            if self.config.debug_checks:
                _, part = cut_route(route, self.config.spread_parts)
                spread, whole = SwitchMode.SPREAD in modes, set(modes) - {SwitchMode.SPREAD}
                checked = [*([route] if whole else ()), *([part] if spread else ())]
                yield from (SwitchCheckKey(route=one) for one in checked if sum(map_widths(one)))
            if SwitchMode.SPLASH in modes or SwitchMode.BLOCKING in modes:
                yield SwitchKey(route=route)
                if route.in_rounds:
                    yield SwitchKey(route=route, more=True)
            beside = kinds[:-1] if SwitchMode.SPLASH in modes else ()
            for bucket in switch_buckets(self.buckets[dst]):
                for kind in dict.fromkeys(beside):
                    yield SwitchKey(route=route, kind=kind, bucket=bucket)
            if SwitchMode.SPREAD in modes:
                pairs = list(zip(*(switch_buckets(self.buckets[layout]) for layout in (src, dst)), strict=True))
                yield from spread_programs(route, self.config.spread_parts, list(dict.fromkeys(kinds)), pairs)


def draw_up(
    config: EngineConfig, free_bytes: int | None = None, model: ModelConfig | None = None, device_kind: str = ""
) -> Blueprint:
    """Check settings against the model's config and derive all sizes. Raises the errors a user can meet.

    `model` is the model's config when the caller has it; otherwise it is read from the checkpoint directory.
    `device_kind` is JAX's, of the device that attention kernels are chosen for.
    """
    model = read_model_config(config.model) if model is None else model
    layouts = {str(layout): layout for layout in map(config.layout_of, config.layouts)}
    for layout in layouts.values():
        check_heads(layout, model.num_heads)
    longest = model.max_position_embeddings if config.max_model_len is None else config.max_model_len
    for name, size in (
        ("max_model_len", longest), ("prefill_tile", config.prefill_tile or 1), ("block_size", config.block_size),
    ):  # fmt: skip
        if size > model.max_position_embeddings:
            raise ConfigError(f"{name} {size} is more than the model's context of {model.max_position_embeddings}.")
    dtype = served_dtype(config.dtype, serving_dtype(model, config.dtype), cpu=device_kind == CPU)
    width = model.kv_lora_rank + model.qk_rope_head_dim
    kv = KVShape(
        page_size=config.block_size,
        interleave=config.interleave,
        bytes_per_token=width * jax.numpy.dtype(dtype).itemsize,
    )
    backend, chip = attention_kernels(config.attention_backend, device_kind)
    shapes = Shapes(
        model=model,
        dtype=dtype,
        kv=kv,
        max_model_len=longest,
        slots=config.max_num_seqs,
        penalties=config.penalties,
        transfer_bytes=config.transfer_bytes,
        attention_backend=backend,
        attention_chip=chip,
        debug_checks=config.debug_checks,
    )
    state = state_bytes(model, dtype, config.num_devices, kv)
    state = replace(state, common=state.common + sampler_bytes(shapes))
    told = free_bytes if config.device_memory_bytes is None else config.device_memory_bytes
    budget = _default_budget(config, state, kv, longest) if told is None else told
    pages = {
        layout: pages_that_fit(state, layout, page_size=kv.page_size, budget=budget, reserve=config.reserve_bytes)
        for layout in layouts.values()
    }
    for layout in layouts.values():
        need = kv.pages_held(layout, 0, longest)
        if pages[layout] < need:
            short = (need - pages[layout]) * kv.page_size * kv.bytes_per_token * (model.num_layers + IN_TRANSIT)
            raise ConfigError(
                f"layout {layout} has {pages[layout]} pages per rank and one request of max_model_len {longest} needs "
                f"{need}: {short} bytes lack. Raise device_memory_bytes (now {budget}), lower max_model_len, or leave "
                f"{layout} out of layouts."
            )
        if pages[layout] * kv.page_size >= NOWHERE:
            raise ConfigError(
                f"layout {layout} has {pages[layout]} pages of {kv.page_size} tokens per rank, more than the {NOWHERE} "
                f"tokens that can be numbered. Lower device_memory_bytes (now {budget})."
            )
    rows = min(config.max_num_batched_tokens, config.max_num_seqs * longest)
    buckets = {layout: make_buckets(config, layout, rows, backend) for layout in layouts.values()}
    blueprint = Blueprint(
        config=config, model=model, shapes=shapes, layouts=layouts, pages=pages, buckets=buckets, state=state
    )
    for layout in layouts.values():
        check_step(layout, buckets[layout][-1], shapes, config.max_num_seqs, config.max_num_batched_tokens)
    if config.compile_ahead and len(list(islice(blueprint.keys(), MOST_PROGRAMS + 1))) > MOST_PROGRAMS:
        raise ConfigError(
            f"more than {MOST_PROGRAMS} programs would have to be compiled for {len(layouts)} layouts, "
            f"{len(blueprint.directions())} directions and {len(set(config.decode_buckets))} decode_buckets: name "
            "fewer, or set compile_ahead=False."
        )
    if config.transfer_bytes is not None:
        routes = [blueprint.route(*pair) for pair in blueprint.directions()]
        least = max((least_transfer_bytes(route, kv.bytes_per_token) for route in routes), default=0)
        if config.transfer_bytes < least:
            raise ConfigError(
                f"transfer_bytes {config.transfer_bytes} is less than a switch can keep to with these pools and "
                f"num_devices: give at least {least}."
            )
    return blueprint


def served_dtype(asked: str, stored: str, *, cpu: bool) -> str:
    """What weights and histories are served in: `asked`, or for "auto" the checkpoint's own dtype, where that is fast.

    A CPU without bfloat16 instructions serves a bfloat16 checkpoint in float32 (docs/decisions/0010-dtypes.md). `cpu`:
    the devices are there, and are CPUs; plans for machines that are not here keep to the checkpoint.
    """
    if asked != AUTO_DTYPE:
        return asked
    return "float32" if cpu and not cpu_has_bfloat16() else stored


def make_buckets(config: EngineConfig, layout: Layout, prompt_rows: int, backend: str) -> tuple[Bucket, ...]:
    """Shapes a step may have, smallest first: rows of one token only, and a last one with `prompt_rows` too.

    `backend` is the one that attention has, "gpu" or "xla".
    """
    groups, tile = layout.owner_groups, config.tile_of(backend)
    most = -(-config.max_num_seqs // groups)
    sizes = config.decode_buckets or (max(1, config.max_num_seqs // 4),)
    decode = sorted({-(-size // groups) for size in sizes} | {most})
    tiles = max(1, -(-prompt_rows // (tile * groups)))
    small = [Bucket(decode=rows, tiles=0, tile=tile) for rows in decode]
    return (*small, Bucket(decode=most, tiles=tiles, tile=tile))


def _default_budget(config: EngineConfig, state: StateBytes, kv: KVShape, longest: int) -> int:
    """On CPU: whole projections, and an even share of the longest requests that may run, within reason."""
    tokens = max(2 * longest, min(config.max_num_seqs * longest // config.num_devices, DEFAULT_MOST_TOKENS))
    pages = -(-tokens // kv.page_size)
    fixed = state.common + state.projections * (state.num_layers + 1) + config.reserve_bytes
    return fixed + pages * kv.page_size * kv.bytes_per_token * (state.num_layers + IN_TRANSIT)


def open_checkpoint(blueprint: Blueprint) -> Checkpoint:
    """Open the weights and compare every tensor with what the model wants. Reads headers only."""
    return open_weights(blueprint.model, blueprint.config.model)


def load_state(blueprint: Blueprint, mesh: Mesh, checkpoint: Checkpoint, progress: Progress | None) -> DeviceState:
    """Weights streamed into the layout's sharding, empty pools, a fresh sampler."""
    layout = blueprint.config.layout_of(blueprint.config.first_layout)
    shapes = blueprint.shapes

    def sharding(leaf: Leaf) -> NamedSharding:
        return NamedSharding(mesh, weight_spec(layout, leaf.dims))

    leaves = model_leaves(blueprint.model, blueprint.config.num_devices)
    leaves = jax.tree.map(lambda leaf: in_blocks(leaf, layout.head_blocks()), leaves)
    read = len({name for leaf in jax.tree.leaves(leaves) for name in leaf.sources})
    what = f"loading {read} of {len(checkpoint.names())} tensors as {shapes.dtype}"
    report = None if progress is None else lambda done, total: progress(what, done, total)
    weights: dict[str, Any] = load_tree(checkpoint, leaves, sharding, shapes.dtype, report)
    pages = blueprint.pages[layout]
    struct = pool_struct(NamedSharding(mesh, pool_spec(layout)), shapes.kv, pages, shapes.width, shapes.dtype)
    return DeviceState(
        weights=weights,
        pools=empty_pools(struct, blueprint.model.num_layers),
        sampler=fresh_state(mesh, shapes),
        layout=layout,
        pages=pages,
    )


def build(
    config: EngineConfig, progress: Progress | None = None, model: ModelConfig | None = None
) -> tuple[Blueprint, Programs, DeviceState]:
    """Everything an engine runs on. With `compile_ahead`, all programs are compiled and a later miss is an error.

    `model` is the model's config when the caller has it.
    """
    blueprint = draw_up(config, model=model)
    checkpoint = open_checkpoint(blueprint)
    prepare_platform(config.num_devices)
    use_compilation_cache(config.compilation_cache_dir)
    start_devices()
    mesh = attention_mesh(dict(config.mesh_shape))
    free = free_memory(mesh) if config.device_memory_bytes is None else None
    blueprint = draw_up(config, free, blueprint.model, device_kind=mesh.devices.flat[0].device_kind)
    asked = config.device_memory_bytes
    check_host_memory(mesh, max(blueprint.footprint(layout).total for layout in blueprint.layouts.values()))
    with room_on_devices(f"device_memory_bytes ({asked or 'not set'}) or max_num_seqs ({config.max_num_seqs})"):
        state = load_state(blueprint, mesh, checkpoint, progress)
        jax.block_until_ready((state.weights, state.pools, state.sampler))
    programs = Programs(mesh, blueprint.shapes)
    if config.compile_ahead:
        report = None if progress is None else lambda done, total: progress("compiling programs", done, total)
        began = time.perf_counter()
        programs.prepare(blueprint.keys(), report)
        programs.sealed = True
        log.info(
            "ready: %d programs for %d layouts and %d switches of %d layers, compiled in %.1f s",
            programs.compiled, len(blueprint.layouts), len(blueprint.directions()), blueprint.model.num_layers,
            time.perf_counter() - began,
        )  # fmt: skip
    return blueprint, programs, state
