"""Measured steps of a real engine: its own programs, in every layout, over histories that are there already."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from splash_jax.cost import Load
from splash_jax.engine import Engine
from splash_jax.kv import PagePool
from splash_jax.ownership import Bucket, Layout
from splash_jax.runtime import Draw, Work, build_batch, run_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One load in one layout."""

    layout: Layout
    load: Load
    seconds: float  # median
    low: float  # quartiles
    high: float


def loads_to_measure(engine: Engine) -> list[Load]:
    """Loads that tell the constants apart: few and many requests, short and long, even and uneven owners, prompts."""
    ranks, slots = engine.config.num_devices, engine.config.max_num_seqs
    longest, room = engine.max_model_len, min(engine.blueprint.pages.values()) * engine.blueprint.shapes.kv.page_size
    found = []
    for batch in sorted({1, max(1, slots // 4), slots}):
        for context in (32, longest // 4, longest - 1):
            if batch * context <= room:
                found.append(Load.decode([context] * batch, ranks))
    few = min(slots, max(2, ranks // 2))
    if few * longest // 2 <= room:
        even = Load.decode([longest // 2] * few, ranks)
        found.append(Load(even.context, even.new_rows, np.zeros_like(even.home)))  # all on one rank
    rows = min(engine.config.max_num_batched_tokens, longest)
    each = max(2, rows // min(ranks, slots))
    count = min(ranks, slots, rows // each)
    for start in sorted({0, longest // 2}):  # a prompt of every rank, and one alone
        for n, part in ((count, each), (1, rows)):
            if n * (start + part) <= room and start + part <= longest:
                found.append(Load(np.full(n, start + part), np.full(n, part), np.arange(n)))
    return found


def measure_steps(
    engine: Engine, loads: Sequence[Load], rounds: int, progress: Callable[[int, int], None] | None = None
) -> list[Measured]:
    """Every load in every layout that its engine was built for, in turn, `rounds` times.

    The engine must be idle. What its pools hold afterwards belongs to nobody.
    """
    times: dict[tuple[Layout, int], list[float]] = {}
    layouts = list(engine.blueprint.layouts.values())
    for n in range(rounds + 1):  # the first warms up
        for layout in layouts:
            _go(engine, layout)
            for i, load in enumerate(loads):
                seconds = _step(engine, load)
                if n and seconds is not None:
                    times.setdefault((layout, i), []).append(seconds)
            if progress is not None:
                progress(n * len(layouts) + layouts.index(layout) + 1, (rounds + 1) * len(layouts))
    return [
        Measured(
            layout=layout,
            load=loads[i],
            seconds=statistics.median(all_of),
            low=float(np.quantile(all_of, 0.25)),
            high=float(np.quantile(all_of, 0.75)),
        )
        for (layout, i), all_of in times.items()
    ]


def _go(engine: Engine, layout: Layout) -> None:
    """Bring an idle engine to a layout, by the switches it has."""
    known = engine.blueprint.directions()
    while engine.layout != layout:
        onward = {src: dst for src, dst in known if src == engine.layout}
        target = layout if (engine.layout, layout) in known else onward[engine.layout]
        future = engine.request_switch(str(target), engine.config.switch_modes[0])
        while engine.busy:
            engine.step()
        future.result(0)


def smallest_bucket(layout: Layout, buckets: Sequence[Bucket], load: Load) -> Bucket | None:
    """The smallest bucket that holds a load; None where none does."""
    decode, tiles = np.zeros(layout.owner_groups, int), np.zeros(layout.owner_groups, int)
    for home, rows in zip(load.home.tolist(), load.new_rows.tolist(), strict=True):
        if rows == 1:
            decode[layout.group_of(home)] += 1
        else:
            tiles[layout.group_of(home)] += -(-rows // buckets[-1].tile)
    return next((b for b in buckets if b.decode >= decode.max() and b.tiles >= tiles.max()), None)


def _step(engine: Engine, load: Load) -> float | None:
    """Seconds of one step, waited for; None where the layout's pages do not hold the load."""
    shapes, layout = engine.blueprint.shapes, engine.layout
    pool = PagePool(layout, shapes.kv, engine.state.pages)
    for i, (context, home) in enumerate(zip(load.context.tolist(), load.home.tolist(), strict=True)):
        pool.add(str(i), home)
        if pool.shortfall(str(i), context):
            return None
        pool.grow(str(i), context)
    works = [
        Work(name=str(i), slot=i, start=context - rows, ids=np.full(rows, 3, np.int32), draw=Draw())
        for i, (context, rows) in enumerate(zip(load.context.tolist(), load.new_rows.tolist(), strict=True))
    ]
    bucket = smallest_bucket(layout, engine.blueprint.buckets[layout], load)
    if bucket is None:
        return None
    began = time.perf_counter()
    batch, _ = build_batch(shapes, layout, bucket, pool, works)
    results = run_step(engine.programs, engine.state, bucket, batch)
    jax.block_until_ready(results.drawn.tokens)
    return time.perf_counter() - began
