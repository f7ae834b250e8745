"""Decode rows by the kernels of `mla_decode`, prompt tiles by XLA."""

import jax
import jax.numpy as jnp

import pallas_kernels.mla_decode as kernels
from pallas_kernels.mla_attention import xla
from pallas_kernels.mla_attention.table import PageTable


def attend(
    q: jax.Array,
    positions: jax.Array,
    pool: jax.Array,
    table: PageTable,
    *,
    decode: int,
    tile: int,
    value_width: int,
    shares: int,
    interleave: int,
) -> tuple[jax.Array, jax.Array]:
    """See `api.mla_attention`."""
    parts = []
    if decode:
        own = jax.tree.map(lambda x: x[:decode], table)
        seen = visible_tokens(positions[:decode], own, shares, interleave)
        parts.append(kernels.mla_decode(q[:decode], pool, own.pages, seen, value_width=value_width))
    if decode < q.shape[0]:
        rest = jax.tree.map(lambda x: x[decode:], table)
        static = {"decode": 0, "tile": tile, "value_width": value_width, "shares": shares, "interleave": interleave}
        parts.append(xla.attend(q[decode:], positions[decode:], pool, rest, **static))
    out, lse = (jnp.concatenate(both) for both in zip(*parts, strict=True))
    return out, lse


def visible_tokens(positions: jax.Array, table: PageTable, shares: int, interleave: int) -> jax.Array:
    """i32[R]: how many of the keys held here stand at or before each row's position; they are the first ones held."""
    run = positions // interleave  # the run of `interleave` positions that the row's own is in
    before = jnp.maximum(0, -(-(run - table.lag) // shares)) * interleave
    here = jnp.where((run % shares == table.lag) & (positions >= 0), positions % interleave + 1, 0)
    return jnp.clip(before + here, 0, table.held)
