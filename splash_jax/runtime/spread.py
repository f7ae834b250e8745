"""A switch spread over several steps: a few layers move per step, in parts, each part beside another layer's compute.

Layers below a boundary have moved and run in the destination, the rest in the source; rows change their order between
them. A layer's state begins to move once the layer has run in one step, and has arrived before it runs in the next:
nothing about it changes in between, so nothing has to be sent twice. Only one layer is on the move at a time.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from splash_jax.models.deepseek_v3_weights import layer_kind
from splash_jax.ownership import Bucket, Layout, SwitchPlan
from splash_jax.runtime.batch import Batch, Places
from splash_jax.runtime.execute import DeviceState, Results, free, put_batch
from splash_jax.runtime.keys import BeginKey, HandoverKey, PartKey, StepKey
from splash_jax.runtime.programs import Programs
from splash_jax.runtime.shapes import groups
from splash_jax.runtime.switch import put_maps
from splash_jax.runtime.transfer import Maps, Route, cut_maps, cut_route, make_maps


class Side(NamedTuple):
    """One of the two layouts that the layers of a step run in, and the step's batch as laid out for it."""

    layout: Layout
    pages: int
    bucket: Bucket
    batch: Batch
    places: Places


@dataclass(slots=True)
class _Moving:
    """A layer whose state is on its way."""

    layer: int
    maps: deque[tuple[jax.Array, ...]]
    part: int = 0
    new: tuple[Any, jax.Array] | None = None


@dataclass(slots=True)
class Spread:
    """How far a spread switch has come. Layers below `boundary` run in the destination in the next step."""

    route: Route
    layers_per_step: int
    parts: int
    boundary: int = 0
    moving: deque[_Moving] = field(default_factory=deque)

    def complete(self, num_layers: int) -> bool:
        """Whether all layers run in the destination in the next step."""
        return self.boundary == num_layers

    @property
    def cut(self) -> tuple[Route, Route]:
        return cut_route(self.route, self.parts)


def prepare_spread_step(
    programs: Programs, state: DeviceState, spread: Spread, src: Side, dst: Side, plan: SwitchPlan | None,
    *, score: bool = False,
) -> Callable[[], Results]:  # fmt: skip
    """One step of a spread switch, all but its dispatch: programs are looked up, batches and maps sent to the devices.

    `plan` has the moves from the pages of `src` to those of `dst` as both are after this step's rows; None when all
    layers have been sent on their way before. The head runs in the layout of the last layer. What this raises has
    changed nothing. Calling what it returns, once, dispatches the step.
    """
    return _Run(programs, state, spread, src, dst, plan, score).dispatch


def spread_programs(route: Route, parts: int, kinds: list[str], buckets: list[tuple[Bucket, Bucket]]) -> list[Any]:
    """Keys of all programs that spread steps on a route can ask for, beside those of ordinary steps."""
    _, part = cut_route(route, parts)
    keys: list[Any] = [BeginKey(route=route), PartKey(route=part, parts=parts)]
    for src_bucket, dst_bucket in buckets:
        keys.append(HandoverKey(src=route.dst, dst=route.src, src_bucket=dst_bucket, dst_bucket=src_bucket))
        sides = ((route.src, src_bucket, route.src_pages), (route.dst, dst_bucket, route.dst_pages))
        for layout, bucket, pages in sides:
            for kind in kinds:
                beside = StepKey(part=kind, layout=layout, bucket=bucket, pages=pages)
                keys.append(PartKey(route=part, parts=parts, beside=beside))
    return keys


class _Run:
    """The working state of one step."""

    def __init__(
        self, programs: Programs, state: DeviceState, spread: Spread, src: Side, dst: Side, plan: SwitchPlan | None,
        score: bool,
    ) -> None:  # fmt: skip
        self.programs, self.state, self.spread, self.src, self.dst = programs, state, spread, src, dst
        layers, boundary = len(state.pools), spread.boundary
        self._score, self._until = score, min(boundary + spread.layers_per_step, layers)
        self._head = self._side(layers - 1)
        for key in self._keys():
            programs.get(key)
        self._inputs = {
            side.layout: put_batch(programs, side.layout, side.bucket, side.pages, side.batch)
            for side in {layer >= boundary: self._side(layer) for layer in range(layers)}.values()
        }
        self._order = self._handover_order() if 0 < boundary < layers else None
        self._maps = self._moves(plan) if plan is not None and self._until > boundary else []

    def _keys(self) -> Iterator[Any]:
        """Keys of every program that the dispatch may call."""
        kinds = list(dict.fromkeys(layer_kind(self.programs.shapes.model, i) for i in range(len(self.state.pools))))
        yield from spread_programs(self.spread.route, self.spread.parts, kinds, [(self.src.bucket, self.dst.bucket)])
        for side in (self.src, self.dst):
            for part in ("embed", *kinds, "head"):
                yield _step(part, side)
        if self._score:
            yield _step("score", self._head)

    def dispatch(self) -> Results:
        state, spread, layers = self.state, self.spread, len(self.state.pools)
        boundary, until = spread.boundary, self._until
        first, last = self._side(0), self._head
        embed = self.programs.get(_step("embed", first))
        x = embed(state.weights["embed"], state.sampler.last, self._inputs[first.layout].rows)
        for i in range(layers):
            if i == boundary and boundary > 0:
                x = self._hand_over(x)
            while spread.moving and spread.moving[0].layer == i:
                self._move_part()
            x = self._layer(i, x)
            if boundary <= i < until:
                spread.moving.append(_Moving(layer=i, maps=deque(self._maps)))
        if boundary == layers:
            while spread.moving:
                self._move_part()
            state.layout, state.pages = self.dst.layout, self.dst.pages
        spread.boundary = until
        head = {"final_norm": state.weights["final_norm"], "lm_head": state.weights["lm_head"]}
        logits = self.programs.get(_step("score", last))(head, x) if self._score else None
        inputs = self._inputs[last.layout]
        state.sampler, drawn = self.programs.get(_step("head", last))(
            head, state.sampler, x, inputs.picks, inputs.floats, inputs.ints
        )
        return Results(drawn, logits)

    def _side(self, layer: int) -> Side:
        return self.dst if layer < self.spread.boundary else self.src

    def _layer(self, i: int, x: jax.Array) -> jax.Array:
        """Run a layer, with a part of the first layer on the move beside it if there is one."""
        side, state, weights = self._side(i), self.state, self.state.weights["layers"][i]
        key, inputs = _step(layer_kind(self.programs.shapes.model, i), side), self._inputs[side.layout]
        args = (weights, x, state.pools[i], inputs.rows, inputs.local)
        if self.spread.moving:
            x, state.pools[i] = self._move_part(key, args)
        else:
            x, state.pools[i] = self.programs.get(key)(*args)
        return x

    def _move_part(self, beside: StepKey | None = None, args: tuple[Any, ...] = ()) -> tuple[Any, ...]:
        """Move the next part of the first layer on the move; returns what the layer beside it returns."""
        spread, moving, layers, pools = (
            self.spread,
            self.spread.moving[0],
            self.state.weights["layers"],
            self.state.pools,
        )
        keeps = spread.route.weights.primitive == "keep"
        old = ({} if keeps else layers[moving.layer]["moved"], pools[moving.layer])
        new = moving.new or self.programs.get(BeginKey(route=spread.route))(*old)
        _, route = spread.cut
        program = self.programs.get(PartKey(route=route, parts=spread.parts, beside=beside))
        part = np.int32(min(moving.part, spread.parts - 1))
        *computed, moved, pool = program(*args, *new, *old, *moving.maps[moving.part], part)
        moving.new, moving.part = (moved, pool), moving.part + 1
        if moving.part == len(moving.maps):
            spread.moving.popleft()
            free(old)
            pools[moving.layer] = pool
            if not keeps:
                layers[moving.layer]["moved"] = moved
        return tuple(computed)

    def _handover_order(self) -> np.ndarray:
        """i32[groups..., R] of the source's rows: their places among the destination's."""
        src, dst = self.src, self.dst
        order = np.full((src.layout.owner_groups * src.bucket.rows,), -1, np.int32)
        for name, rows in src.places.rows.items():
            order[rows] = dst.places.rows[name]
        return order.reshape(*groups(src.layout), src.bucket.rows)

    def _hand_over(self, x: jax.Array) -> jax.Array:
        """Rows of the destination's order to the source's."""
        src, dst = self.src, self.dst
        key = HandoverKey(src=dst.layout, dst=src.layout, src_bucket=dst.bucket, dst_bucket=src.bucket)
        return self.programs.get(key)(x, self._order)

    def _moves(self, plan: SwitchPlan) -> list[tuple[jax.Array, ...]]:
        """The moves of a layer in parts, on the devices."""
        whole, part = self.spread.cut
        parts: list[Maps] = []
        for maps in make_maps(whole, plan.kv):
            parts += cut_maps(whole, self.spread.parts, maps)
        return [put_maps(self.programs, part, maps) for maps in parts]


def _step(part: str, side: Side) -> StepKey:
    return StepKey(part=part, layout=side.layout, bucket=side.bucket, pages=side.pages)
