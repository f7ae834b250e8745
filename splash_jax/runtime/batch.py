"""Build the arrays of one step from what the scheduler chose. Plain numpy; nothing here decides anything.

Rows are laid out by owner group: decode rows, then tiles of prompt rows. Rows left over are padding at
position -1, which is never written, attended from, sampled or routed.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from splash_jax.kv import PagePool
from splash_jax.ownership import Bucket, Layout
from splash_jax.runtime.shapes import MAX_STOP_IDS, NOWHERE, Shapes, groups, sample_rows

FLOAT_FIELDS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
INT_FIELDS = ("slot", "top_k", "seed", "seed_high", "sample", "token", "ban_stops", "top_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How the next token of a request is drawn."""

    temperature: float = 0.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    seed: int = 0  # 64 bits
    sample: int = 0  # which of the n samples of one prompt
    token: int = 0  # how many tokens the request has generated before this one
    banned: tuple[int, ...] = ()  # stop ids that may not come yet
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one request does in a step: rows at positions start .. start + n - 1.

    `ids` i32[n] are the tokens of those rows; None means one row whose token is the last one drawn in `slot`, which
    only the device may know yet. `draw` is set when the last row's token is to be drawn.
    """

    name: str
    slot: int
    start: int
    ids: np.ndarray | None
    draw: Draw | None = None

    @property
    def rows(self) -> int:
        return 1 if self.ids is None else len(self.ids)


class Batch(NamedTuple):
    """One step's inputs. G stands for the sizes of the owner axes, T for all ranks, S for sampled rows."""

    rows: np.ndarray  # i32[3, G..., R]: token (-1: the slot's last), slot, position (-1: padding). Replicated
    local: np.ndarray  # i32[T, X]: per rank, see `Local`
    picks: np.ndarray  # i32[G..., sequences]: row that each sequence samples. Replicated
    floats: np.ndarray  # f32[S, len(FLOAT_FIELDS)]: dealt over all ranks
    ints: np.ndarray  # i32[S, len(INT_FIELDS) + MAX_STOP_IDS]: dealt over all ranks


@dataclass(frozen=True, slots=True)
class Places:
    """Where the batch put things, for reading the step's results back."""

    sampled: dict[str, int] = field(default_factory=dict)  # request -> row of the sampler
    rows: dict[str, np.ndarray] = field(default_factory=dict)  # request -> flat row indices, in order of position


class Local(NamedTuple):
    """A rank's own part of a step, views of one array i32[X]. R rows, S sequences, W pages of each at most."""

    write: Any  # [R]: slot of the pool that each row is written to
    pages: Any  # [S, W]
    held: Any  # [S]: tokens of each sequence here
    lag: Any  # [S]
    items: Any  # [N, 4] and
    first: Any  # [decode rows + 1] and
    turns: Any  # [workers + 1]: the decode rows' `Work`; empty where no kernel wants it


@functools.cache
def _local_shapes(shapes: Shapes, layout: Layout, bucket: Bucket) -> Local:
    R, S, W = bucket.rows, bucket.sequences, shapes.table_width(layout)
    work = shapes.cut_decodes(layout, np.zeros(bucket.single_rows, np.int32))
    items, first, turns = ((0, 4), (0,), (0,))
    if work is not None:
        items, first, turns = work.items.shape, work.first.shape, work.turns.shape
    return Local(write=(R,), pages=(S, W), held=(S,), lag=(S,), items=items, first=first, turns=turns)


def local_size(shapes: Shapes, layout: Layout, bucket: Bucket) -> int:
    """X of `Local`."""
    return sum(map(math.prod, _local_shapes(shapes, layout, bucket)))


def unpack_local(shapes: Shapes, layout: Layout, bucket: Bucket, local: Any) -> Local:
    """Views of i32[X], numpy's or JAX's."""
    sizes = _local_shapes(shapes, layout, bucket)
    ends = np.cumsum([math.prod(size) for size in sizes]).tolist()
    starts = (0, *ends[:-1])
    return Local(*(local[a:b].reshape(size) for a, b, size in zip(starts, ends, sizes, strict=True)))


def build_batch(
    shapes: Shapes, layout: Layout, bucket: Bucket, pool: PagePool, works: Sequence[Work]
) -> tuple[Batch, Places]:
    """Lay `works` out in `bucket`. The pages of every row must have been taken in `pool` before.

    Raises ValueError when they do not fit: the scheduler promised that they would.
    """
    G, R, S = groups(layout), bucket.rows, bucket.sequences
    n_groups, page_size = layout.owner_groups, shapes.kv.page_size
    rows = np.zeros((3, n_groups, R), np.int32)
    rows[2] = -1
    local = np.zeros((layout.size, local_size(shapes, layout, bucket)), np.int32)
    views = [unpack_local(shapes, layout, bucket, local[rank]) for rank in range(layout.size)]
    for view in views:
        view.write[:] = NOWHERE
    picks = np.zeros((n_groups, S), np.int32)
    total = sample_rows(layout, bucket)
    floats = np.tile(np.asarray([0, 1, 0, 0, 0, 1], np.float32), (total, 1))
    ints = np.full((total, len(INT_FIELDS) + MAX_STOP_IDS), -1, np.int32)
    ints[:, 1 : len(INT_FIELDS)] = 0
    ints[:, 0] = shapes.slots  # out of bounds: dropped
    used = [[0, 0] for _ in range(n_groups)]
    places = Places()
    for work in works:
        home = pool.home(work.name)
        group = layout.group_of(home)
        at = []
        for first_row, sequence, begin, count in _pieces(bucket, used[group], work):
            row = slice(first_row, first_row + count)
            positions = np.arange(work.start + begin, work.start + begin + count)
            rows[0, group, row] = -1 if work.ids is None else work.ids[begin : begin + count]
            rows[1, group, row] = work.slot
            rows[2, group, row] = positions
            at.append(group * R + np.arange(first_row, first_row + count))
            for rank in layout.holders(home):
                lag = layout.lag(home, rank)
                view = views[rank]
                mine = np.asarray(pool.pages(work.name, rank), np.int32)
                view.held[sequence] = shapes.kv.tokens_held(layout, lag, int(positions[-1]) + 1)
                view.lag[sequence] = lag
                view.pages[sequence, : len(mine)] = mine
                here = shapes.kv.lag_of(layout, positions) == lag
                index = shapes.kv.local_index(layout, positions[here])
                slots = mine[index // page_size] * page_size + index % page_size
                view.write[first_row + np.flatnonzero(here)] = slots
            last_row, last_sequence = first_row + count - 1, sequence
        places.rows[work.name] = np.concatenate(at)
        if work.draw is not None:
            picks[group, last_sequence] = last_row
            sampled = group * S + last_sequence
            places.sampled[work.name] = sampled
            _fill_draw(floats[sampled], ints[sampled], work.draw, work.slot)
    _cut_decodes(shapes, layout, bucket, views)
    shape = lambda x, lead: x.reshape(*lead, *G, x.shape[-1])  # noqa: E731
    return Batch(shape(rows, (3,)), local, shape(picks, ()), floats, ints), places


def _cut_decodes(shapes: Shapes, layout: Layout, bucket: Bucket, views: Sequence[Local]) -> None:
    """Fill in every rank's work: a decode row sees all that is held of it. Ranks that hold the same are cut alike."""
    known: dict[bytes, Any] = {}
    for view in views:
        held = view.held[: bucket.single_rows]
        if (key := held.tobytes()) not in known:
            known[key] = shapes.cut_decodes(layout, held)
        if (work := known[key]) is not None:
            view.items[:], view.first[:], view.turns[:] = work.items, work.first, work.turns


def _pieces(bucket: Bucket, used: list[int], work: Work) -> list[tuple[int, int, int, int]]:
    """Cut a work into sequences: (first row, sequence, first of its rows, rows); advances `used`."""
    if work.rows == 1 and used[0] < bucket.decode:
        used[0] += 1
        return [(used[0] - 1, used[0] - 1, 0, 1)]
    pieces = []
    for begin in range(0, work.rows, max(bucket.tile, 1)):
        if used[1] == bucket.tiles:
            raise ValueError(f"request {work.name!r} with {work.rows} rows does not fit bucket {bucket}.")
        first = bucket.decode + used[1] * bucket.tile
        pieces.append((first, bucket.decode + used[1], begin, min(bucket.tile, work.rows - begin)))
        used[1] += 1
    return pieces


def _fill_draw(floats: np.ndarray, ints: np.ndarray, draw: Draw, slot: int) -> None:
    floats[:] = [getattr(draw, name) for name in FLOAT_FIELDS]
    high, low = (np.uint32(half).view(np.int32) for half in divmod(draw.seed, 2**32))
    ints[: len(INT_FIELDS)] = [
        slot, draw.top_k, low, high, draw.sample, draw.token, len(draw.banned) > 0, draw.top_logprobs
    ]  # fmt: skip
    ints[len(INT_FIELDS) : len(INT_FIELDS) + len(draw.banned)] = draw.banned
