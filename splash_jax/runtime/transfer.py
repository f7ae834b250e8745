"""Move one layer's state from one layout to another, on local views inside `jax.shard_map`.

The source's slots are all read, in one gather, before any destination slot is written, so that a pool that keeps its
size is updated in place.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from splash_jax.ownership import Layout, SwitchPlan, WeightMove
from splash_jax.ownership.plan import KVMove
from splash_jax.runtime.shapes import NOWHERE, Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The static shapes of a switch between two layouts: what its programs are keyed by."""

    src: Layout
    dst: Layout
    src_pages: int
    dst_pages: int
    grain: int  # tokens
    sends: int  # grains per pair of ranks in one round; with `gathers`, per rank
    gathers: bool  # all ranks receive everything that is sent
    locals: int  # grains that a rank may relocate in one round
    weights: WeightMove

    @property
    def moves_nothing(self) -> bool:
        """Whether no device state can change: only block tables do."""
        return (
            self.weights.primitive == "keep"
            and self.src_pages == self.dst_pages
            and self.sends == 0
            and self.locals == 0
        )


class Maps(NamedTuple):
    """One round of a plan's moves as arrays: slots in grains, out of bounds where there is nothing to move."""

    read: np.ndarray  # i32[T, locals + sends (* T)]: slots read on each rank, local moves first
    write: np.ndarray  # i32[T, locals + sends * T]: slots written on each rank, local moves first


def make_route(
    shapes: Shapes,
    src: Layout,
    dst: Layout,
    src_pages: int,
    dst_pages: int,
    weights: WeightMove,
    sends: int | None = None,
) -> Route:
    """The route of a switch. `sends` overrides the number of grains per round, which otherwise holds any all-to-all."""
    kv, ranks = shapes.kv, src.size
    grain = kv.grain(src, dst)
    per_page = kv.page_size // grain
    shuffled = grain < kv.page_size
    gathers = dst.everywhere and not src.everywhere
    moves = not src.everywhere and (
        gathers or src.owner_axes != dst.owner_axes or src.position_axes != dst.position_axes
    )
    if sends is None:
        most = max(src_pages, dst_pages) * per_page
        share = math.ceil(most / ranks)
        if not gathers:
            # What a pair exchanges of a request is rounded up to a grain; a rank is home to an even share of requests.
            sends = min(most, share + math.ceil(shapes.slots / ranks))
        elif shuffled or src_pages > dst_pages:
            # One round: a later one would read what an earlier one had overwritten. Dealt positions are even anyhow.
            sends = most if src.owner_axes else min(most, share + shapes.slots)
        else:
            sends = share
    relocated = dst_pages if shuffled else min(dst_pages, max(0, src_pages - dst_pages))
    return Route(
        src=src,
        dst=dst,
        src_pages=src_pages,
        dst_pages=dst_pages,
        grain=grain,
        sends=sends if moves else 0,
        gathers=gathers,
        locals=relocated * per_page,
        weights=weights,
    )


def map_widths(route: Route) -> tuple[int, int]:
    """Slots that each rank reads and writes in one round, local moves included."""
    pairs = route.sends * route.src.size
    return route.locals + (route.sends if route.gathers else pairs), route.locals + pairs


def make_maps(route: Route, move: KVMove) -> list[Maps]:
    """The rounds of a plan's moves on a route: one, unless a gather is more uneven than the route has room for."""
    T = route.src.size
    if move.grain != route.grain:
        raise ValueError(f"the plan moves grains of {move.grain} tokens, the route of {route.grain}.")
    sent = _by_sender(route, move)
    if sent and not route.sends:
        raise ValueError(f"the plan sends {move.busiest_pair} grains between ranks; the route has room for none.")
    rounds = max([1] + [math.ceil(len(s) / route.sends) for s in sent.values() if route.sends])
    if rounds > 1 and not route.gathers:
        raise ValueError(f"a pair of ranks exchanges {move.busiest_pair} grains; the route has room for {route.sends}.")
    result = []
    for step in range(rounds):
        reads, writes = map_widths(route)
        read, write = np.zeros((T, reads), np.int32), np.full((T, writes), NOWHERE, np.int32)
        if step == 0:
            for rank, pairs in enumerate(move.local):
                read[rank, : len(pairs)], write[rank, : len(pairs)] = pairs[:, 0], pairs[:, 1]
        for key, grains in sent.items():
            chunk = grains[step * route.sends : (step + 1) * route.sends]
            source, begin = (key, 0) if route.gathers else (key[0], key[1] * route.sends)
            at = route.locals + begin
            read[source, at : at + len(chunk)] = [grain for grain, _ in chunk]
            for index, (_, targets) in enumerate(chunk):
                for rank, slot in targets:
                    write[rank, route.locals + source * route.sends + index] = slot
        result.append(Maps(read, write))
    return result


def _by_sender(route: Route, move: KVMove) -> dict:
    """What each buffer carries, in order: source slot -> (rank, slot) of everyone who takes it.

    A buffer belongs to a sender where all ranks receive everything, else to a (sender, receiver) pair.
    """
    buffers: dict = {}
    for (source, destination), pairs in move.sent.items():
        buffer = buffers.setdefault(source if route.gathers else (source, destination), {})
        for grain, slot in pairs.tolist():
            buffer.setdefault(grain, []).append((destination, slot))
    return {key: list(buffer.items()) for key, buffer in buffers.items()}


def move_weights(route: Route, moved: dict[str, jax.Array], head_dims: dict[str, int]) -> dict[str, jax.Array]:
    """One layer's projections: gathered along the head dimension where the destination keeps them whole, or cut."""
    sizes = {axis.name: axis.size for axis in route.src.axes}
    for axis in route.weights.gather_axes:
        moved = {n: _gather_heads(w, axis, head_dims[n]) for n, w in moved.items()}
    for axis in route.weights.slice_axes:
        moved = {n: _own_slice(w, axis, sizes[axis], head_dims[n]) for n, w in moved.items()}
    return moved


def _gather_heads(w: jax.Array, axis: str, dim: int) -> jax.Array:
    """The parts of all ranks along `dim`. They travel as they lie: what has to be transposed is so on arrival, or else
    the transfer would wait for a transposition that a GPU's scheduler puts behind the layer's compute.
    """
    parts = jnp.moveaxis(jax.lax.all_gather(w, axis), 0, dim)
    return parts.reshape(*w.shape[:dim], -1, *w.shape[dim + 1 :])


def _own_slice(w: jax.Array, axis: str, size: int, dim: int) -> jax.Array:
    width = w.shape[dim] // size
    return jax.lax.dynamic_slice_in_dim(w, jax.lax.axis_index(axis) * width, width, dim)


def move_pool(route: Route, pool: jax.Array, read: jax.Array, write: jax.Array) -> jax.Array:
    """One layer's pages [1, src_pages, page_size, width] to [1, dst_pages, page_size, width], one round of moves."""
    page_size, width = pool.shape[2:]
    per_page = page_size // route.grain
    old = pool.reshape(-1, route.grain, width)
    size = route.dst_pages * per_page
    new = old[:size] if size <= len(old) else jnp.pad(old, ((0, size - len(old)), (0, 0), (0, 0)))
    new = scatter_round(route, old, new, read, write)
    return new.reshape(1, route.dst_pages, page_size, width)


def scatter_round(route: Route, old: jax.Array, new: jax.Array, read: jax.Array, write: jax.Array) -> jax.Array:
    """Write one round of moves out of `old` into `new`, both [grains, grain, width]."""
    if route.sends + route.locals == 0:
        return new
    names = route.src.axis_names
    taken = old.at[read[0]].get(mode="clip")
    if route.locals:
        new = new.at[write[0, : route.locals]].set(taken[: route.locals], mode="drop")
    if route.sends:
        buffer = taken[route.locals :]
        if route.gathers:
            arrived = jax.lax.all_gather(buffer, names, axis=0, tiled=True)
        else:
            arrived = jax.lax.all_to_all(buffer, names, split_axis=0, concat_axis=0, tiled=True)
        new = new.at[write[0, route.locals :]].set(arrived, mode="drop")
    return new


def exact_route(shapes: Shapes, plan: SwitchPlan) -> Route:
    """The route of a plan without padding beyond its busiest buffer, one round: for this plan only."""
    route = make_route(
        shapes,
        plan.before.layout,
        plan.after.layout,
        plan.before.pages_per_rank,
        plan.after.pages_per_rank,
        plan.weights,
    )
    return replace(route, sends=max(map(len, _by_sender(route, plan.kv).values()), default=0))


def plan_route(shapes: Shapes, plan: SwitchPlan, sends: int | None = None) -> Route:
    """The route that a plan takes; unless `sends` says otherwise, an exchange has room for all of it in one round."""
    before, after = plan.before, plan.after
    route = make_route(
        shapes, before.layout, after.layout, before.pages_per_rank, after.pages_per_rank, plan.weights, sends
    )
    if sends is not None or route.gathers or plan.kv.busiest_pair <= route.sends:
        return route
    return replace(route, sends=plan.kv.busiest_pair)
