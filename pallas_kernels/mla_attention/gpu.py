"""Decode rows by the kernels of `mla_decode`, prompt tiles by XLA."""

import jax
import jax.numpy as jnp

import pallas_kernels.mla_decode as kernels
from pallas_kernels.chip import this_chip
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
    chip: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.mla_attention`. What no kernel takes goes to XLA too."""
    static = {"tile": tile, "value_width": value_width, "shares": shares, "interleave": interleave}
    parts = []
    if decode:
        own = jax.tree.map(lambda x: x[:decode], table)
        seen = visible_tokens(positions[:decode], own, shares, interleave)
        part = _by_a_kernel(q[:decode], pool, own.pages, seen, value_width, chip)
        parts.append(part or xla.attend(q[:decode], positions[:decode], pool, own, decode=decode, **static))
    if decode < q.shape[0]:
        rest = jax.tree.map(lambda x: x[decode:], table)
        parts.append(xla.attend(q[decode:], positions[decode:], pool, rest, decode=0, **static))
    out, lse = (jnp.concatenate(both) for both in zip(*parts, strict=True))
    return out, lse


def _by_a_kernel(
    q: jax.Array, pool: jax.Array, pages: jax.Array, seen: jax.Array, value_width: int, chip: str | None
) -> tuple[jax.Array, jax.Array] | None:
    """By the first kernel that takes it; by the oracle where there is no GPU; None where every kernel refuses."""
    here = this_chip()
    target = chip or (here and here.name)
    for backend in kernels.order_of(target, q.shape[1])[:-1] if target else ("ref",):
        try:
            return kernels.mla_decode(q, pool, pages, seen, value_width=value_width, backend=backend, chip=chip)
        except NotImplementedError:
            continue
    return None


def visible_tokens(positions: jax.Array, table: PageTable, shares: int, interleave: int) -> jax.Array:
    """i32[R]: how many of the keys held here stand at or before each row's position; they are the first ones held."""
    run = positions // interleave  # the run of `interleave` positions that the row's own is in
    before = jnp.maximum(0, -(-(run - table.lag) // shares)) * interleave
    here = jnp.where((run % shares == table.lag) & (positions >= 0), positions % interleave + 1, 0)
    return jnp.clip(before + here, 0, table.held)
