"""Move one layer's state from one layout to another, on local views inside `jax.shard_map`.

The source's slots are all read, in one gather, before any destination slot is written, so that a pool that keeps its
size is updated in place.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from splash_jax.ownership import Layout, SwitchPlan, WeightMove
from splash_jax.ownership.plan import KVMove
from splash_jax.ownership.travel import gathers, most_grains, travel_axes
from splash_jax.runtime.pages import put, take
from splash_jax.runtime.shapes import NOWHERE, Shapes

MOST_CHUNKS = 64  # each is written out in a switch's program
POOLS_AT_A_TIME = 1.5  # of the destination: most that a rank receives in one chunk, unless `Shapes` says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The static shapes of a switch between two layouts: what its programs are keyed by."""

    src: Layout
    dst: Layout
    src_pages: int
    dst_pages: int
    grain: int  # tokens
    per_page: int  # grains
    axes: tuple[str, ...]  # along which histories travel: ranks that agree in all others form a group
    sends: int  # grains per pair of ranks in one round; with `gathers`, per rank
    gathers: bool  # all ranks of a group receive everything that is sent in it
    locals: int  # grains that a rank may relocate in one round
    in_rounds: bool  # what does not fit one round may follow in further ones
    weights: WeightMove
    chunks: int = 1  # equal pieces, one after another, that a round's moves are cut into
    kernels: bool = False  # whether pages are gathered and scattered by kernels

    @property
    def group(self) -> int:
        """Ranks that exchange with each other."""
        return math.prod(axis.size for axis in self.src.axes if axis.name in self.axes)

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

    read: np.ndarray  # i32[T, locals + sends (* group)]: slots read on each rank, local moves first
    write: np.ndarray  # i32[T, locals + sends * group]: slots written on each rank, local moves first


def make_route(
    shapes: Shapes,
    src: Layout,
    dst: Layout,
    src_pages: int,
    dst_pages: int,
    weights: WeightMove,
    sends: int | None = None,
) -> Route:
    """The route of a switch. `sends` overrides the number of grains per round, else what any switch may need.

    A gather of whole pages into a pool no smaller has room for an even share instead: what it sends stays in its place
    on the sender, so the rest may follow in further rounds. Elsewhere a later round would read what an earlier one had
    overwritten. What a rank would receive beyond `shapes.transfer_bytes` comes in chunks.
    """
    kv = shapes.kv
    grain, axes = kv.grain(src, dst), travel_axes(src, dst)
    per_page = kv.page_size // grain
    shuffled = grain < kv.page_size
    group = math.prod(axis.size for axis in src.axes if axis.name in axes)
    in_rounds = gathers(src, dst) and not shuffled and src_pages <= dst_pages
    if sends is None:
        sends, share = most_grains(kv, src, dst, src_pages, dst_pages, shapes.slots), math.ceil(dst_pages / group)
        in_rounds = in_rounds and share < sends
        sends = share if in_rounds else sends
    relocated = dst_pages if shuffled else min(dst_pages, max(0, src_pages - dst_pages))
    route = Route(
        src=src,
        dst=dst,
        src_pages=src_pages,
        dst_pages=dst_pages,
        grain=grain,
        per_page=per_page,
        axes=axes,
        sends=sends if axes else 0,
        gathers=gathers(src, dst),
        locals=relocated * per_page,
        in_rounds=in_rounds,
        weights=weights,
        kernels=shapes.kernels,
    )
    most = shapes.transfer_bytes or POOLS_AT_A_TIME * dst_pages * kv.page_size * kv.bytes_per_token
    at_a_time = max(1, int(most // (group * grain * kv.bytes_per_token)))  # grains that each rank sends
    return in_chunks(route, math.ceil(route.sends / at_a_time))


def in_chunks(route: Route, chunks: int) -> Route:
    """The route with its moves in so many chunks, and room for no less: what a rank receives at a time is one's.

    In fewer where chunks of as many grains are enough, so that less than one is padded, and in MOST_CHUNKS at most.
    """
    grains = route.sends or route.locals
    each = -(-grains // min(max(1, chunks), MOST_CHUNKS))
    chunks = -(-grains // max(1, each)) or 1
    sends, relocated = -(-route.sends // chunks) * chunks, -(-route.locals // chunks) * chunks
    return replace(route, sends=sends, locals=relocated, chunks=chunks)


def least_transfer_bytes(route: Route, bytes_per_token: int) -> int:
    """The least `Shapes.transfer_bytes` that a route can keep to, in MOST_CHUNKS chunks."""
    return -(-route.sends // MOST_CHUNKS) * route.group * route.grain * bytes_per_token


def map_widths(route: Route) -> tuple[int, int]:
    """Slots that each rank reads and writes in one round, local moves included."""
    pairs = route.sends * route.group
    return route.locals + (route.sends if route.gathers else pairs), route.locals + pairs


def lacks_room(route: Route, move: KVMove) -> str | None:
    """Why a plan's moves do not fit a route, or None where they do."""
    if move.grain != route.grain:
        return f"the plan moves grains of {move.grain} tokens, the route of {route.grain}."
    if (most := max(map(len, move.local), default=0)) > route.locals:
        return f"a rank relocates {most} grains; the route has room for {route.locals}."
    if move.sent and not route.sends:
        return f"the plan sends {move.busiest_pair} grains between ranks; the route has room for none."
    if any(_place(route, a) != _place(route, b) for a, b in move.sent):
        return f"the plan sends grains along other axes than {', '.join(route.axes)}."
    if (most := _fullest(route, move)) > route.sends and not route.in_rounds:
        return f"a pair of ranks exchanges {most} grains; the route has room for {route.sends}."
    return None


def make_maps(route: Route, move: KVMove) -> list[Maps]:
    """The rounds of a plan's moves on a route: one, unless a gather is more uneven than the route has room for."""
    if reason := lacks_room(route, move):
        raise ValueError(reason)
    buffers = _buffers(route, move)
    rounds = max(1, -(-_longest(buffers) // max(1, route.sends)))
    reads, writes = map_widths(route)
    read = np.zeros((rounds, route.src.size, reads), np.int32)
    write = np.full((rounds, route.src.size, writes), NOWHERE, np.int32)
    for rank, pairs in enumerate(move.local):
        read[0, rank, : len(pairs)], write[0, rank, : len(pairs)] = pairs[:, 0], pairs[:, 1]
    for places in buffers:
        for (source, destination), place in places.items():
            pairs, (step, at) = move.sent[source, destination], np.divmod(place, route.sends)
            receiver = 0 if route.gathers else route.src.index(destination, route.axes)
            read[step, source, route.locals + receiver * route.sends + at] = pairs[:, 0]
            sender = route.src.index(source, route.axes)
            write[step, destination, route.locals + sender * route.sends + at] = pairs[:, 1]
    return [Maps(*both) for both in zip(read, write, strict=True)]


def _place(route: Route, rank: int) -> int:
    """Which group of ranks that exchange with each other a rank is in."""
    return route.src.index(rank, [name for name in route.src.axis_names if name not in route.axes])


def _fullest(route: Route, move: KVMove) -> int:
    """Grains in the fullest buffer: of a sender where all receive everything, else of a pair."""
    if not route.gathers:
        return move.busiest_pair
    return _longest(_buffers(route, move))


Places = dict[tuple[int, int], np.ndarray]  # (source, destination rank) -> where in a buffer each grain lies, i64[n]


def _longest(buffers: list[Places]) -> int:
    """Grains in the fullest."""
    return max((int(place.max()) + 1 for places in buffers for place in places.values()), default=0)


def _buffers(route: Route, move: KVMove) -> list[Places]:
    """For each buffer the pairs of ranks that it serves, and where in it each of their grains lies.

    A buffer belongs to a sender where all ranks receive everything, and a grain lies in it once; else to a pair.
    """
    buffers: dict[object, Places] = {}
    for pair, grains in move.sent.items():
        buffers.setdefault(pair[0] if route.gathers else pair, {})[pair] = grains[:, 0]
    for served in buffers.values():
        _, first, which = np.unique(np.concatenate(list(served.values())), return_index=True, return_inverse=True)
        order = np.empty_like(first)
        order[np.argsort(first)] = np.arange(len(first))
        ends = np.cumsum([len(slots) for slots in served.values()])[:-1]
        served.update(zip(served, np.split(order[which], ends), strict=True))
    return list(buffers.values())


def move_weights(route: Route, moved: dict[str, jax.Array], head_dims: dict[str, int]) -> dict[str, jax.Array]:
    """One layer's projections: cut along axes that split heads from now on, then gathered along those that did.

    A rank's heads lie as [sizes of the axes that do not split them, in the mesh's order..., heads per block].
    """
    sizes = {axis.name: axis.size for axis in route.src.axes}
    whole = [name for name in sizes if name not in route.src.head_axes]
    for axis in route.weights.slice_axes:
        before = math.prod(sizes[name] for name in whole[: whole.index(axis)])
        moved = {n: _own_part(w, head_dims[n], before, axis, sizes[axis]) for n, w in moved.items()}
        whole.remove(axis)
    if gathered := route.weights.gather_axes:
        have = [*gathered, *whole]
        order = sorted(range(len(have)), key=lambda i: list(sizes).index(have[i]))
        lead = [sizes[name] for name in have]
        for n, w in moved.items():
            moved = moved | {n: _reordered(_gather_heads(w, gathered, head_dims[n]), head_dims[n], lead, order)}
    return moved


def _gather_heads(w: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """The parts of all ranks along `dim`. They travel as they lie: what has to be transposed is so on arrival, or else
    the transfer would wait for a transposition that a GPU's scheduler puts behind the layer's compute.
    """
    parts = jnp.moveaxis(jax.lax.all_gather(w, axes), 0, dim)
    return parts.reshape(*w.shape[:dim], -1, *w.shape[dim + 1 :])


def _own_part(w: jax.Array, dim: int, before: int, axis: str, size: int) -> jax.Array:
    """This rank's part of dimension `dim`, [before, size, rest] in one, along an axis."""
    shape = w.shape
    cut = w.reshape(*shape[:dim], before, size, shape[dim] // (before * size), *shape[dim + 1 :])
    mine = jax.lax.dynamic_slice_in_dim(cut, jax.lax.axis_index(axis), 1, dim + 1)
    return mine.reshape(*shape[:dim], shape[dim] // size, *shape[dim + 1 :])


def _reordered(w: jax.Array, dim: int, lead: list[int], order: list[int]) -> jax.Array:
    """Dimension `dim`, [*lead, rest] in one, with its leading parts in another order."""
    if order == sorted(order):
        return w
    cut = w.reshape(*w.shape[:dim], *lead, -1, *w.shape[dim + 1 :])
    moves = [*range(dim), *(dim + i for i in order), *range(dim + len(lead), cut.ndim)]
    return cut.transpose(moves).reshape(w.shape)


def move_pool(route: Route, pool: jax.Array, read: jax.Array, write: jax.Array) -> jax.Array:
    """One layer's pages [1, src_pages, page_size, width] to [1, dst_pages, page_size, width], one round of moves.

    In one chunk a pool that keeps its size is updated in place; of several, each reads the old pool and writes the new.
    """
    old, new = _grains(route, pool), _grains(route, resized(route, pool))
    if route.chunks == 1:
        new = scatter_round(route, old, new, read, write)
    else:
        one = replace(route, sends=route.sends // route.chunks, locals=route.locals // route.chunks, chunks=1)
        for chunk in zip(_cut(route, read, route.chunks), _cut(route, write, route.chunks), strict=True):
            # The barrier keeps the buffers of a later chunk from being filled while an earlier one's are in use.
            old, new = jax.lax.optimization_barrier((old, scatter_round(one, old, new, *chunk)))
    return new.reshape(1, route.dst_pages, *pool.shape[2:])


def resized(route: Route, pool: jax.Array) -> jax.Array:
    """A layer's pages with as many as the destination has: cut off, or zero where there were none."""
    more = route.dst_pages - route.src_pages
    return jnp.pad(pool, ((0, 0), (0, more), (0, 0), (0, 0))) if more > 0 else pool[:, : route.dst_pages]


def _grains(route: Route, pool: jax.Array) -> jax.Array:
    return pool.reshape(-1, route.grain, pool.shape[-1])


def scatter_round(route: Route, old: jax.Array, new: jax.Array, read: jax.Array, write: jax.Array) -> jax.Array:
    """Write one round of moves out of `old` into `new`, both [grains, grain, width]."""
    if route.sends + route.locals == 0:
        return new
    taken = take(old, read[0], kernels=route.kernels)
    if route.locals:
        new = put(new, write[0, : route.locals], taken[: route.locals], kernels=route.kernels)
    if route.sends:
        buffer = taken[route.locals :]
        if route.gathers:
            arrived = jax.lax.all_gather(buffer, route.axes, axis=0, tiled=True)
        else:
            arrived = jax.lax.all_to_all(buffer, route.axes, split_axis=0, concat_axis=0, tiled=True)
        new = put(new, write[0, route.locals :], arrived, kernels=route.kernels)
    return new


def fresh_shape(route: Route, w: jax.Array, head_dim: int) -> tuple[int, ...]:
    """The shape that a rank's part of a projection has in the destination."""
    heads = w.shape[head_dim] * route.src.head_shards // route.dst.head_shards
    return (*w.shape[:head_dim], heads, *w.shape[head_dim + 1 :])


def move_part(
    route: Route,
    parts: int,
    head_dims: dict[str, int],
    old: dict[str, jax.Array],
    old_pool: jax.Array,
    new: dict[str, jax.Array],
    new_pool: jax.Array,
    read: jax.Array,
    write: jax.Array,
    part: jax.Array,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """One of `parts` parts of a layer's move, written into what the parts before it left.

    Projections are cut along a dimension that is not the heads'; `part` i32[] says which cut.
    """
    arrived = dict(new)
    for name, w in old.items():
        cut = 1 if head_dims[name] == 0 else 0
        width = -(-w.shape[cut] // parts)
        start = jnp.minimum(part * width, w.shape[cut] - width)
        piece = jax.lax.dynamic_slice_in_dim(w, start, width, cut)
        moved = move_weights(route, {name: piece}, head_dims)[name]
        arrived[name] = jax.lax.dynamic_update_slice_in_dim(new[name], moved, start, cut)
    pool = scatter_round(route, _grains(route, old_pool), _grains(route, new_pool), read, write)
    return arrived, pool.reshape(new_pool.shape)


def cut_route(route: Route, parts: int) -> tuple[Route, Route]:
    """A route for a move in `parts` equal parts, and the route of one part.

    A history that grows while it moves takes pages of either layout as they come, so any page may have to be relocated.
    """
    sends = -(-route.sends // parts)
    relocated = -(-min(route.src_pages, route.dst_pages) * route.per_page // parts)
    whole = replace(route, sends=sends * parts, locals=relocated * parts, chunks=1)
    return whole, replace(whole, sends=sends, locals=relocated)


def cut_maps(whole: Route, parts: int, maps: Maps) -> list[Maps]:
    """One round of a whole route's moves, in parts."""
    pairs = zip(_cut(whole, maps.read, parts), _cut(whole, maps.write, parts), strict=True)
    return [Maps(read, write) for read, write in pairs]


def _cut(route: Route, slots: Any, parts: int) -> list[Any]:
    """One round's slots i32[ranks, locals + buffers of sends], of numpy or JAX, in equal parts of the same form."""
    xp, ranks = (np if isinstance(slots, np.ndarray) else jnp), slots.shape[0]
    local = xp.split(slots[:, : route.locals], parts, 1)
    if not route.sends:
        return local
    sent = xp.split(slots[:, route.locals :].reshape(ranks, -1, route.sends), parts, 2)
    return [xp.concatenate([a, b.reshape(ranks, -1)], 1) for a, b in zip(local, sent, strict=True)]


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
    return replace(route, sends=_fullest(route, plan.kv), in_rounds=False, chunks=1)


def plan_route(shapes: Shapes, plan: SwitchPlan, sends: int | None = None) -> Route:
    """The route that a plan takes, whoever made it; unless `sends` says otherwise, it has room for all of it."""
    before, after = plan.before, plan.after
    route = make_route(
        shapes, before.layout, after.layout, before.pages_per_rank, after.pages_per_rank, plan.weights, sends
    )
    if any(_place(route, a) != _place(route, b) for a, b in plan.kv.sent):  # requests that leave their owner
        route = replace(route, axes=route.src.axis_names, gathers=False, in_rounds=False)
    if sends is not None or route.in_rounds:
        return route
    return in_chunks(replace(route, sends=max(route.sends, _fullest(route, plan.kv))), route.chunks)
