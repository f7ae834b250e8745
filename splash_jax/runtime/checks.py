"""Check what a step is handed: the arrays of a state when it is made, and with `debug_checks` every step's indices.

A program of its own checks the indices on the devices, as they arrived there, before anything else is dispatched. Where
`debug_checks` is off, that program does not exist.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from splash_jax.errors import BoundsError, ConfigError
from splash_jax.layouts import pool_spec
from splash_jax.ownership import Bucket, Layout
from splash_jax.runtime.batch import FLOAT_FIELDS, INT_FIELDS, unpack_local
from splash_jax.runtime.shapes import MAX_STOP_IDS, MAX_TOP_LOGPROBS, NOWHERE, Shapes
from splash_jax.runtime.transfer import Route

STEP_CHECKS = (
    "token ids outside the vocabulary",
    "request slots outside the engine's",
    "request slots that two sampled rows share",
    "positions outside the context",
    "rows that are written outside the pool",
    "rows that are written where another one is",
    "rows that are written to a page of another request",
    "pages outside the pool in a block table",
    "lengths beyond their block table",
    "position shares that there are not",
    "sampled rows outside the step",
    "sampling settings outside their range",
    "pieces of decode work outside their list",
)
SWITCH_CHECKS = (
    "grains that are read outside the source's pool",
    "grains that are written outside the destination's pool",
    "grains that are written where another one is",
)


def check_state(state: Any) -> None:
    """Raise `ConfigError` unless a `DeviceState` can be stepped.

    Every array is live, every layer has a pool of its own in the layout's shape and sharding, and no two arrays that
    steps donate share memory.
    """
    donated = {"sampler": state.sampler}
    for i, (pool, layer) in enumerate(zip(state.pools, state.weights["layers"], strict=False)):
        donated |= {f"pools[{i}]": pool, f"the moving weights of layer {i}": layer["moved"]}
    if len(state.pools) != len(state.weights["layers"]):
        raise ConfigError(f"{len(state.pools)} pools for {len(state.weights['layers'])} layers; give each layer one.")
    for i, pool in enumerate(state.pools):
        _check_pool(f"pools[{i}]", pool, state)
    seen: dict[tuple[str, int], str] = {}
    for name, arrays in donated.items():
        for path, array in jax.tree_util.tree_leaves_with_path(arrays):
            leaf = name + jax.tree_util.keystr(path)
            if array.is_deleted():
                raise ConfigError(f"{leaf} was deleted or donated before; make it anew.")
            for shard in array.addressable_shards:
                if not shard.data.nbytes:
                    continue
                place = str(shard.device), shard.data.unsafe_buffer_pointer()
                if (other := seen.setdefault(place, leaf)) != leaf:
                    raise ConfigError(f"{leaf} and {other} are one buffer, and steps donate both; give each its own.")


def _check_pool(name: str, pool: jax.Array, state: Any) -> None:
    first, lead = state.pools[0], (state.layout.size, state.pages)
    if pool.ndim != 4 or pool.shape[:2] != lead or (pool.shape, pool.dtype) != (first.shape, first.dtype):
        raise ConfigError(
            f"{name} is {pool.dtype}{list(pool.shape)}; in {state.layout} every pool is {first.dtype}[{lead[0]} ranks, "
            f"{lead[1]} pages, page size, width], all alike."
        )
    lies, spec = pool.sharding, pool_spec(state.layout)
    if not isinstance(lies, NamedSharding) or not lies.is_equivalent_to(NamedSharding(lies.mesh, spec), pool.ndim):
        raise ConfigError(f"{name} lies as {lies}; place it as NamedSharding(mesh, {spec}).")


def step_faults(shapes: Shapes, layout: Layout, bucket: Bucket, pages: int, inputs: Sequence[jax.Array]) -> jax.Array:
    """i32[ranks, len(STEP_CHECKS)], on every rank: how many indices of a step's `StepInputs` each rank finds wrong."""
    rows, local, picks, floats, ints = inputs
    here = unpack_local(shapes, layout, bucket, local[0])
    W, page = shapes.table_width(layout), shapes.kv.page_size
    used = jnp.arange(W, dtype=jnp.int32)[None] * page < here.held[:, None]
    written = here.write != NOWHERE
    row = np.arange(bucket.rows)
    sequence = np.where(row < bucket.decode, row, bucket.decode + (row - bucket.decode) // max(bucket.tile, 1))
    own = (here.pages[sequence] == (here.write // page)[:, None]) & used[sequence]
    sampled = jax.lax.all_gather(ints[:, 0], layout.axis_names, tiled=True)
    counts = (
        jnp.sum(outside(rows[0], -1, shapes.model.vocab_size) & (rows[2] >= 0)),
        jnp.sum(outside(rows[1], 0, shapes.slots)),
        _repeated(jnp.where(sampled < shapes.slots, sampled, -1)),
        jnp.sum(outside(rows[2], -1, shapes.max_model_len)),
        jnp.sum(written & outside(here.write, 0, pages * page)),
        _repeated(jnp.where(written, here.write, -1)),
        jnp.sum(written & ~own.any(1)),
        jnp.sum(used & outside(here.pages, 0, pages)),
        jnp.sum(outside(here.held, 0, W * page + 1)),
        jnp.sum(outside(here.lag, 0, layout.position_shares)),
        jnp.sum(outside(picks, 0, bucket.rows)),
        _bad_settings(shapes, floats, ints),
        _bad_work(here),
    )
    return jax.lax.all_gather(jnp.stack([count.astype(jnp.int32) for count in counts]), layout.axis_names)


def switch_faults(route: Route, read: jax.Array, write: jax.Array) -> jax.Array:
    """i32[ranks, len(SWITCH_CHECKS)], on every rank: how many entries of a round's maps each rank finds wrong."""
    written = write[0] != NOWHERE
    counts = (
        jnp.sum(outside(read[0], 0, route.src_pages * route.per_page)),
        jnp.sum(written & outside(write[0], 0, route.dst_pages * route.per_page)),
        _repeated(jnp.where(written, write[0], -1)),
    )
    return jax.lax.all_gather(jnp.stack([count.astype(jnp.int32) for count in counts]), route.src.axis_names)


def raise_faults(what: str, checks: Sequence[str], faults: jax.Array) -> None:
    """Wait for what `step_faults` or `switch_faults` found; raise `BoundsError` where that is anything."""
    found = np.asarray(faults.addressable_data(0))
    lines = [
        f"{found[rank, i]} {checks[i]} (rank {rank})"
        for i in range(len(checks))
        for rank in np.flatnonzero(found[:, i])
    ]
    if lines:
        raise BoundsError(
            f"{what}: {'; '.join(lines)}. Nothing was dispatched. In a loop of your own, correct the batch or the "
            f"maps; in the engine this is a bug: please report it."
        )


def outside(x: jax.Array, low: int, high: int) -> jax.Array:
    """Whether each number of i32[...] lies outside [low, high)."""
    return (x < low) | (x >= high)


def _repeated(x: jax.Array) -> jax.Array:
    """How many of i32[N] stand there twice, those below 0 not counted."""
    ordered = jnp.sort(x)
    return jnp.sum((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0))


def _bad_settings(shapes: Shapes, floats: jax.Array, ints: jax.Array) -> jax.Array:
    f = {name: floats[:, i] for i, name in enumerate(FLOAT_FIELDS)}
    i = {name: ints[:, k] for k, name in enumerate(INT_FIELDS)}
    banned = ints[:, len(INT_FIELDS) : len(INT_FIELDS) + MAX_STOP_IDS]
    bad = ~jnp.isfinite(floats).all(1) | (f["temperature"] < 0) | (f["repetition"] <= 0)
    bad |= (f["top_p"] < 0) | (f["top_p"] > 1) | (f["min_p"] < 0) | (f["min_p"] > 1)
    bad |= outside(i["slot"], 0, shapes.slots + 1) | outside(i["top_logprobs"], 0, MAX_TOP_LOGPROBS + 1)
    bad |= (i["top_k"] < 0) | (i["sample"] < 0) | (i["token"] < 0)
    return jnp.sum(bad | outside(banned, -1, shapes.model.vocab_size).any(1))


def _bad_work(here: Any) -> jax.Array:
    """Of a kernel's decode work: pieces of a row, and turns of a worker, that are no stretch of the list of items."""
    wrong = jnp.zeros((), jnp.int32)
    for ends in (here.first, here.turns):
        if len(ends):
            wrong += jnp.sum(outside(ends, 0, len(here.items) + 1)) + jnp.sum(ends[1:] < ends[:-1])
    return wrong
