"""What every program computes, and the shapes and shardings of what goes in and comes out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from splash_jax.kv.store import pool_struct
from splash_jax.layouts import Exchange, local_spec, pool_spec, row_spec, weight_spec
from splash_jax.models.deepseek_v3_weights import layer_kind, model_leaves
from splash_jax.models.params import Leaf
from splash_jax.ownership import Bucket, Layout
from splash_jax.runtime.batch import FLOAT_FIELDS, INT_FIELDS, local_size
from splash_jax.runtime.checks import step_faults, switch_faults
from splash_jax.runtime.keys import (
    BeginKey,
    HandoverKey,
    Key,
    PartKey,
    ResetKey,
    StepCheckKey,
    StepKey,
    SwitchCheckKey,
    SwitchKey,
)
from splash_jax.runtime.sampler import SamplerState
from splash_jax.runtime.shapes import MAX_STOP_IDS, Shapes, groups, sample_rows
from splash_jax.runtime.step import Step, reorder_rows
from splash_jax.runtime.transfer import (
    Route,
    fresh_shape,
    map_widths,
    move_part,
    move_pool,
    move_weights,
    resized,
    scatter_round,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A function of local views, its arguments (shape, PartitionSpec) in order, and what it donates."""

    function: Callable[..., Any]
    args: tuple[Any, ...]  # trees of shapes
    specs: tuple[Any, ...]  # trees of PartitionSpecs, or prefixes of them
    out_specs: Any
    donates: tuple[int, ...] = ()


class Signatures:
    """Signatures of all programs of an engine on a mesh."""

    def __init__(self, mesh: Mesh, shapes: Shapes) -> None:
        self.mesh, self.shapes = mesh, shapes
        self.leaves = model_leaves(shapes.model, int(mesh.devices.size))

    def of(self, key: Key) -> Signature:
        if isinstance(key, ResetKey):
            return self._reset()
        if isinstance(key, SwitchKey):
            return self._switch(key)
        if isinstance(key, BeginKey):
            return self._begin(key.route)
        if isinstance(key, PartKey):
            part = self._part(key)
            return part if key.beside is None else _beside(self._layer(key.beside), part)
        if isinstance(key, HandoverKey):
            return self._handover(key)
        if isinstance(key, StepCheckKey):
            return self._step_check(key)
        if isinstance(key, SwitchCheckKey):
            return self._switch_check(key.route)
        parts = {"embed": self._embed, "head": self._head, "score": self._score}
        return parts.get(key.part, self._layer)(key)

    def structs(self, signature: Signature) -> tuple[Any, ...]:
        """The arguments' shapes with their shardings."""

        def struct(spec: P, tree: Any) -> Any:
            sharding = NamedSharding(self.mesh, spec)
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype or self.shapes.dtype), sharding=sharding),
                tree,
            )

        return jax.tree.map(struct, signature.specs, signature.args, is_leaf=lambda x: isinstance(x, P))

    def _embed(self, key: StepKey) -> Signature:
        table = self.leaves["embed"]
        return Signature(
            function=Step(self.shapes, key.layout, key.bucket).embed,
            args=(table, _ints(self.shapes.slots), self._rows(key.layout, key.bucket)),
            specs=(weight_spec(key.layout, table.dims), P(), P()),
            out_specs=row_spec(key.layout),
        )

    def _layer(self, key: StepKey) -> Signature:
        layout, shapes = key.layout, self.shapes
        kinds = [layer_kind(shapes.model, i) for i in range(shapes.model.num_layers)]
        weights = self.leaves["layers"][kinds.index(key.part)]
        local = _ints(layout.size, local_size(shapes, layout, key.bucket))
        rows = self._rows(layout, key.bucket)
        return Signature(
            function=Step(shapes, layout, key.bucket).layer,
            args=(weights, self._hidden(layout, key.bucket), self._pool(layout, key.pages), rows, local),
            specs=(_leaf_specs(layout, weights), row_spec(layout), pool_spec(layout), P(), local_spec(layout)),
            out_specs=(row_spec(layout), pool_spec(layout)),
            donates=(1, 2),
        )

    def _head(self, key: StepKey) -> Signature:
        layout, bucket = key.layout, key.bucket
        weights, specs = self._head_weights(layout)
        (sampling, sampling_specs), dealt = self._sampling(layout, bucket), local_spec(layout)
        return Signature(
            function=Step(self.shapes, layout, bucket).head,
            args=(weights, self._state(), self._hidden(layout, bucket), *sampling),
            specs=(specs, P(), row_spec(layout), *sampling_specs),
            out_specs=(P(), dealt),
            donates=(1,),
        )

    def _sampling(self, layout: Layout, bucket: Bucket) -> tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[P, ...]]:
        """`picks`, `floats` and `ints` of a batch, and their specs."""
        total, dealt = sample_rows(layout, bucket), local_spec(layout)
        picks = _ints(*groups(layout), bucket.sequences)
        floats = jax.ShapeDtypeStruct((total, len(FLOAT_FIELDS)), jnp.float32)
        return (picks, floats, _ints(total, len(INT_FIELDS) + MAX_STOP_IDS)), (P(), dealt, dealt)

    def _step_check(self, key: StepCheckKey) -> Signature:
        layout, bucket = key.layout, key.bucket
        sampling, specs = self._sampling(layout, bucket)
        local = _ints(layout.size, local_size(self.shapes, layout, bucket))
        return Signature(
            function=lambda *inputs: step_faults(self.shapes, layout, bucket, key.pages, inputs),
            args=(self._rows(layout, bucket), local, *sampling),
            specs=(P(), local_spec(layout), *specs),
            out_specs=P(),
        )

    def _switch_check(self, route: Route) -> Signature:
        maps = local_spec(route.src)
        return Signature(
            function=partial(switch_faults, route), args=self._maps(route), specs=(maps, maps), out_specs=P()
        )

    def _score(self, key: StepKey) -> Signature:
        weights, specs = self._head_weights(key.layout)
        return Signature(
            function=Step(self.shapes, key.layout, key.bucket).score,
            args=(weights, self._hidden(key.layout, key.bucket)),
            specs=(specs, row_spec(key.layout)),
            out_specs=P(None, key.layout.axis_names),
        )

    def _reset(self) -> Signature:
        def reset(state: SamplerState, slot: jax.Array, row: jax.Array) -> SamplerState:
            return SamplerState(state.last, state.counts.at[slot].set(row))

        args = (self._state(), _ints(), _ints(self.shapes.model.vocab_size))
        return Signature(function=reset, args=args, specs=(P(), P(), P()), out_specs=P(), donates=(0,))

    def _switch(self, key: SwitchKey) -> Signature:
        if key.more:
            return self._more(key.route)
        moving = self._transfer(key.route)
        if key.kind is None or key.bucket is None:
            return moving
        route = key.route
        layer = self._layer(StepKey(part=key.kind, layout=route.dst, bucket=key.bucket, pages=route.dst_pages))
        return _beside(layer, moving)

    def _transfer(self, route: Route) -> Signature:
        leaves = self.leaves["layers"][0]["moved"]
        head_dims = {name: leaf.dims.index("heads") for name, leaf in leaves.items()}

        def transfer(moved: Any, pool: jax.Array, read: jax.Array, write: jax.Array) -> Any:
            with jax.named_scope("switch.move"):
                return move_weights(route, moved, head_dims), move_pool(route, pool, read, write)

        maps = local_spec(route.src)
        return Signature(
            function=transfer,
            args=(leaves, self._pool(route.src, route.src_pages), *self._maps(route)),
            specs=(_leaf_specs(route.src, leaves), pool_spec(route.src), maps, maps),
            out_specs=(_leaf_specs(route.dst, leaves), pool_spec(route.dst)),
            donates=(0, 1),
        )

    def _begin(self, route: Route) -> Signature:
        leaves = self._moving_leaves(route)

        def begin(moved: Any, pool: jax.Array) -> Any:
            shapes = {name: fresh_shape(route, w, leaves[name].dims.index("heads")) for name, w in moved.items()}
            return {name: jnp.zeros(shape, moved[name].dtype) for name, shape in shapes.items()}, resized(route, pool)

        return Signature(
            function=begin,
            args=(leaves, self._pool(route.src, route.src_pages)),
            specs=(_leaf_specs(route.src, leaves), pool_spec(route.src)),
            out_specs=(_leaf_specs(route.dst, leaves), pool_spec(route.dst)),
        )

    def _part(self, key: PartKey) -> Signature:
        route = key.route
        leaves = self._moving_leaves(route)
        head_dims = {name: leaf.dims.index("heads") for name, leaf in leaves.items()}

        def part(new: Any, new_pool: jax.Array, old: Any, old_pool: jax.Array, *maps: jax.Array) -> Any:
            with jax.named_scope("switch.move"):
                return move_part(route, key.parts, head_dims, old, old_pool, new, new_pool, *maps)

        old_specs, new_specs = _leaf_specs(route.src, leaves), _leaf_specs(route.dst, leaves)
        dealt = local_spec(route.src)
        return Signature(
            function=part,
            args=(
                leaves,
                self._pool(route.dst, route.dst_pages),
                leaves,
                self._pool(route.src, route.src_pages),
                *self._maps(route),
                _ints(),
            ),
            specs=(new_specs, pool_spec(route.dst), old_specs, pool_spec(route.src), dealt, dealt, P()),
            out_specs=(new_specs, pool_spec(route.dst)),
            donates=(0, 1),
        )

    def _moving_leaves(self, route: Route) -> dict[str, Leaf]:
        return {} if route.weights.primitive == "keep" else self.leaves["layers"][0]["moved"]

    def _handover(self, key: HandoverKey) -> Signature:
        src, dst = key.src, key.dst
        return Signature(
            function=partial(reorder_rows, Exchange(src), Exchange(dst)),
            args=(self._hidden(src, key.src_bucket), _ints(*groups(dst), key.dst_bucket.rows)),
            specs=(row_spec(src), P()),
            out_specs=row_spec(dst),
        )

    def _more(self, route: Route) -> Signature:
        def more(pool: jax.Array, read: jax.Array, write: jax.Array) -> jax.Array:
            with jax.named_scope("switch.move"):
                flat = pool.reshape(-1, route.grain, pool.shape[-1])
                return scatter_round(route, flat, flat, read, write).reshape(pool.shape)

        maps = local_spec(route.dst)
        return Signature(
            function=more,
            args=(self._pool(route.dst, route.dst_pages), *self._maps(route)),
            specs=(pool_spec(route.dst), maps, maps),
            out_specs=pool_spec(route.dst),
            donates=(0,),
        )

    def _maps(self, route: Route) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        read, write = map_widths(route)
        return _ints(route.src.size, read), _ints(route.src.size, write)

    def _head_weights(self, layout: Layout) -> tuple[dict[str, Leaf], dict[str, P]]:
        leaves = {name: self.leaves[name] for name in ("final_norm", "lm_head")}
        return leaves, _leaf_specs(layout, leaves)

    def _hidden(self, layout: Layout, bucket: Bucket) -> jax.ShapeDtypeStruct:
        shape = (*groups(layout), bucket.rows, self.shapes.model.hidden_size)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.shapes.dtype))

    def _pool(self, layout: Layout, pages: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, pool_spec(layout))
        return pool_struct(sharding, self.shapes.kv, pages, self.shapes.width, self.shapes.dtype)

    def _rows(self, layout: Layout, bucket: Bucket) -> jax.ShapeDtypeStruct:
        return _ints(3, *groups(layout), bucket.rows)

    def _state(self) -> dict[str, jax.ShapeDtypeStruct] | Any:
        return jax.tree.map(lambda x: _ints(*x.shape), host_state(self.shapes))


def _beside(layer: Signature, other: Signature) -> Signature:
    """Both in one program, neither depending on the other: the layer's arguments and results come first."""
    split = len(layer.args)

    def both(*args: Any) -> Any:
        arrived = other.function(*args[split:])
        return (*layer.function(*args[:split]), *arrived)

    return Signature(
        function=both,
        args=(*layer.args, *other.args),
        specs=(*layer.specs, *other.specs),
        out_specs=(*layer.out_specs, *other.out_specs),
        donates=(*layer.donates, *(split + i for i in other.donates)),
    )


def host_state(shapes: Shapes) -> SamplerState:
    """The sampler's state before any token, as numpy: counts are [slots, V], or [1, 1] where nobody may need them."""
    counts = (shapes.slots, shapes.model.vocab_size) if shapes.penalties else (1, 1)
    zeros: Any = (np.zeros((shapes.slots,), np.int32), np.zeros(counts, np.int32))
    return SamplerState(*zeros)


def _leaf_specs(layout: Layout, leaves: dict[str, Any]) -> dict[str, Any]:
    """Specs of a tree of leaves."""
    return jax.tree.map(lambda leaf: weight_spec(layout, leaf.dims), leaves)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
