"""Every compiled program, looked up by what it is for. All are compiled before serving; a miss after that is an error.

Layers of one kind share programs, so their number does not grow with depth.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from splash_jax.errors import ProgramMissing
from splash_jax.kv.store import pool_struct
from splash_jax.layouts import local_spec, pool_spec, row_spec, weight_spec
from splash_jax.models.deepseek_v3_weights import layer_kind, model_leaves
from splash_jax.models.params import Leaf
from splash_jax.ownership import Bucket, Layout
from splash_jax.runtime.batch import FLOAT_FIELDS, INT_FIELDS, local_size
from splash_jax.runtime.sampler import Drawn, SamplerState
from splash_jax.runtime.shapes import MAX_STOP_IDS, Shapes, groups, sample_rows
from splash_jax.runtime.step import Step
from splash_jax.runtime.transfer import Route, move_pool, move_weights, scatter_round


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKey:
    """A program of an ordinary step. `part` is "embed", "head", "score" or a layer kind."""

    part: str
    layout: Layout
    bucket: Bucket
    pages: int

    def __str__(self) -> str:
        return f"{self.part} {self.layout} {self.bucket}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchKey:
    """A program of a switch: a layer's transfer, with the layer before it computed beside it when `kind` is set.

    With `more` it is a further round of a gather that one round could not hold.
    """

    route: Route
    kind: str | None = None
    bucket: Bucket | None = None
    more: bool = False

    def __str__(self) -> str:
        beside = f" beside {self.kind} {self.bucket}" if self.kind else ""
        return f"transfer {self.route.src}->{self.route.dst}{' (more)' if self.more else ''}{beside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetKey:
    """The program that sets the token counts of a slot."""

    def __str__(self) -> str:
        return "reset slot"


Key = StepKey | SwitchKey | ResetKey
LayerWeights = Mapping[str, Any]


class Programs:
    """Compiled programs of one engine on one mesh.

    `get` answers from what was compiled; while `sealed` it raises `ProgramMissing` for the rest, otherwise it compiles
    then and there and counts it in `compiled`.
    """

    def __init__(self, mesh: Mesh, shapes: Shapes) -> None:
        self.mesh, self.shapes = mesh, shapes
        self.leaves = model_leaves(shapes.model, int(mesh.devices.size))
        self.sealed = False
        self._programs: dict[Key, Any] = {}
        self._lock = threading.Lock()

    @property
    def compiled(self) -> int:
        return len(self._programs)

    def get(self, key: Key) -> Any:
        """The compiled program of a key."""
        program = self._programs.get(key)
        if program is None:
            if self.sealed:
                raise ProgramMissing(f"no program was compiled for {key}; a step asked for what nobody announced.")
            program = self._build(key)
            with self._lock:
                self._programs[key] = program
        return program

    def prepare(self, keys: Iterable[Key], progress: Callable[[int, int], None] | None = None) -> None:
        """Compile what is missing of `keys`, two at a time: tracing holds the interpreter, compiling does not."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._programs]
        with ThreadPoolExecutor(2) as pool:
            for done, _ in enumerate(pool.map(self.get, missing), 1):
                if progress:
                    progress(done, len(missing))

    def lower(self, key: Key) -> jax.stages.Lowered:
        """The program of a key, traced and lowered but not compiled."""
        function, specs, out_specs, args, donate = self._describe(key)
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped, donate_argnums=donate).trace(*args).lower()

    def _build(self, key: Key) -> Any:
        return self.lower(key).compile()

    def _describe(self, key: Key) -> tuple[Callable[..., Any], Any, Any, tuple[Any, ...], tuple[int, ...]]:
        """(function of local views, in specs, out specs, argument shapes, donated arguments) of a key."""
        if isinstance(key, ResetKey):
            return self._reset(key)
        if isinstance(key, SwitchKey):
            return self._switch(key)
        return self._step(key)

    def _step(self, key: StepKey) -> tuple[Callable[..., Any], Any, Any, tuple[Any, ...], tuple[int, ...]]:
        step, layout = Step(self.shapes, key.layout, key.bucket), key.layout
        if key.part == "embed":
            specs = (weight_spec(layout, self.leaves["embed"].dims), P(), P())
            args = (self.leaves["embed"], self._last(), self._rows(key))
            return step.embed, specs, row_spec(layout), self._structs(args, specs), ()
        if key.part == "head":
            specs = (
                *self._head_specs(layout),
                SamplerState(P(), P()),
                row_spec(layout),
                P(),
                local_spec(layout),
                local_spec(layout),
            )
            args = (self._head_weights(), self._state(), self._hidden(key), *self._sampling(key))
            out = (SamplerState(P(), P()), Drawn(local_spec(layout), local_spec(layout)))
            return step.head, specs, out, self._structs(args, specs), (1,)
        if key.part == "score":
            specs = (*self._head_specs(layout), row_spec(layout))
            args = (self._head_weights(), self._hidden(key))
            return step.score, specs, P(None, layout.axis_names), self._structs(args, specs), ()
        specs, args = self._layer_args(key.part, layout, key)
        out = (row_spec(layout), pool_spec(layout))
        return step.layer, specs, out, self._structs(args, specs), (1, 2)

    def _switch(self, key: SwitchKey) -> tuple[Callable[..., Any], Any, Any, tuple[Any, ...], tuple[int, ...]]:
        route = key.route
        leaves = self.leaves["layers"][0]["moved"]
        head_dims = {name: leaf.dims.index("heads") for name, leaf in leaves.items()}
        moved_specs = {
            at: {n: weight_spec(at, leaf.dims) for n, leaf in leaves.items()} for at in (route.src, route.dst)
        }
        maps = local_spec(route.src)
        map_args = (self._array((route.src.size, route.locals + route.sends * (1 if route.gathers else route.src.size))),
                    self._array((route.src.size, route.locals + route.sends * route.src.size)))  # fmt: skip
        if key.more:

            def more(pool: jax.Array, read: jax.Array, write: jax.Array) -> jax.Array:
                flat = pool.reshape(-1, route.grain, pool.shape[-1])
                return scatter_round(route, flat, flat, read, write).reshape(pool.shape)

            specs = (pool_spec(route.dst), maps, maps)
            args = (self._pool(route.dst, route.dst_pages), *map_args)
            return more, specs, pool_spec(route.dst), self._structs(args, specs), (0,)

        def transfer(moved: Any, pool: jax.Array, read: jax.Array, write: jax.Array) -> Any:
            with jax.named_scope("switch.move"):
                return move_weights(route, moved, head_dims), move_pool(route, pool, read, write)

        state_specs = (moved_specs[route.src], pool_spec(route.src), maps, maps)
        state_args = (leaves, self._pool(route.src, route.src_pages), *map_args)
        state_out = (moved_specs[route.dst], pool_spec(route.dst))
        if key.kind is None or key.bucket is None:
            return transfer, state_specs, state_out, self._structs(state_args, state_specs), (0, 1)
        step = Step(self.shapes, route.dst, key.bucket)
        at = StepKey(part=key.kind, layout=route.dst, bucket=key.bucket, pages=route.dst_pages)
        layer_specs, layer_args = self._layer_args(key.kind, route.dst, at)

        def beside(w: Any, x: Any, pool: Any, rows: Any, local: Any, *state: Any) -> Any:
            arrived = transfer(*state)
            return (*step.layer(w, x, pool, rows, local), *arrived)

        specs, args = (*layer_specs, *state_specs), (*layer_args, *state_args)
        out = (row_spec(route.dst), pool_spec(route.dst), *state_out)
        return beside, specs, out, self._structs(args, specs), (1, 2, 5, 6)

    def _reset(self, key: ResetKey) -> tuple[Callable[..., Any], Any, Any, tuple[Any, ...], tuple[int, ...]]:
        def reset(state: SamplerState, slot: jax.Array, row: jax.Array) -> SamplerState:
            return SamplerState(state.last, state.counts.at[slot].set(row))

        specs = (SamplerState(P(), P()), P(), P())
        args = (self._state(), self._array(()), self._array((self.shapes.model.vocab_size,)))
        return reset, specs, specs[0], self._structs(args, specs), (0,)

    def _layer_args(self, kind: str, layout: Layout, key: StepKey) -> tuple[Any, Any]:
        cfg = self.shapes.model
        leaves = next(w for i, w in enumerate(self.leaves["layers"]) if layer_kind(cfg, i) == kind)
        is_leaf = lambda x: isinstance(x, Leaf)  # noqa: E731
        w_specs = jax.tree.map(lambda leaf: weight_spec(layout, leaf.dims), leaves, is_leaf=is_leaf)
        specs = (w_specs, row_spec(layout), pool_spec(layout), P(), local_spec(layout))
        local = self._array((layout.size, local_size(self.shapes, layout, key.bucket)))
        return specs, (leaves, self._hidden(key), self._pool(layout, key.pages), self._rows(key), local)

    def _head_specs(self, layout: Layout) -> tuple[dict[str, P]]:
        return ({n: weight_spec(layout, leaf.dims) for n, leaf in self._head_weights().items()},)

    def _head_weights(self) -> dict[str, Leaf]:
        return {"final_norm": self.leaves["final_norm"], "lm_head": self.leaves["lm_head"]}

    def _hidden(self, key: StepKey) -> jax.ShapeDtypeStruct:
        shape = (*groups(key.layout), key.bucket.rows, self.shapes.model.hidden_size)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.shapes.dtype))

    def _pool(self, layout: Layout, pages: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, pool_spec(layout))
        return pool_struct(sharding, self.shapes.kv, pages, self.shapes.width, self.shapes.dtype)

    def _rows(self, key: StepKey) -> jax.ShapeDtypeStruct:
        return self._array((3, *groups(key.layout), key.bucket.rows))

    def _sampling(self, key: StepKey) -> tuple[jax.ShapeDtypeStruct, ...]:
        total = sample_rows(key.layout, key.bucket)
        return (
            self._array((*groups(key.layout), key.bucket.sequences)),
            jax.ShapeDtypeStruct((total, len(FLOAT_FIELDS)), jnp.float32),
            self._array((total, len(INT_FIELDS) + MAX_STOP_IDS)),
        )

    def _last(self) -> jax.ShapeDtypeStruct:
        return self._array((self.shapes.slots,))

    def _state(self) -> SamplerState:
        counts = (self.shapes.slots, self.shapes.model.vocab_size) if self.shapes.penalties else (1, 1)
        return SamplerState(self._last(), self._array(counts))

    def _array(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def _structs(self, args: Any, specs: Any) -> Any:
        """Argument shapes with their shardings."""
        dtype = self.shapes.dtype

        def struct(spec: P, arg: Any) -> jax.ShapeDtypeStruct:
            kind = jnp.dtype(arg.dtype or dtype)
            return jax.ShapeDtypeStruct(arg.shape, kind, sharding=NamedSharding(self.mesh, spec))

        return jax.tree.map(struct, specs, args, is_leaf=lambda x: isinstance(x, P | Leaf))


def fresh_state(mesh: Mesh, shapes: Shapes) -> SamplerState:
    """The sampler's state before any token."""
    counts = (shapes.slots, shapes.model.vocab_size) if shapes.penalties else (1, 1)
    place = NamedSharding(mesh, P())
    return SamplerState(
        jax.device_put(np.zeros((shapes.slots,), np.int32), place),
        jax.device_put(np.zeros(counts, np.int32), place),
    )
