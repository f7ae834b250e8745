"""Decode rows by the kernels of `mla_decode`, prompt tiles by those of `mla_prefill`; by XLA what they refuse."""

import jax
import jax.numpy as jnp

import pallas_kernels.mla_decode as kernels
import pallas_kernels.mla_prefill as prefill
from pallas_kernels.chip import target_chip
from pallas_kernels.mla_attention import xla
from pallas_kernels.mla_attention.table import PageTable
from pallas_kernels.mla_decode.formats import is_fp8
from pallas_kernels.mla_prefill.account import Call, tiles_or_rows


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
    """See `api.mla_attention`. What no kernel takes goes to XLA, and prompt tiles where there is no GPU."""
    static = {"tile": tile, "value_width": value_width, "shares": shares, "interleave": interleave}
    parts = []
    if decode:
        own = jax.tree.map(lambda x: x[:decode], table)
        seen = visible_tokens(positions[:decode], own, shares, interleave)
        part = _by_a_kernel(q[:decode], pool, own.pages, seen, value_width, chip)
        parts.append(part or xla.attend(q[:decode], positions[:decode], pool, own, decode=decode, **static))
    if decode < q.shape[0]:
        rest = jax.tree.map(lambda x: x[decode:], table)
        by_row = PageTable(rest.pages, jnp.repeat(rest.held, tile), jnp.repeat(rest.lag, tile))
        seen = visible_tokens(positions[decode:], by_row, shares, interleave)
        part = _tiles_by_a_kernel(q[decode:], pool, rest.pages, seen, tile, value_width, chip)
        parts.append(part or xla.attend(q[decode:], positions[decode:], pool, rest, decode=0, **static))
    out, lse = (jnp.concatenate(both) for both in zip(*parts, strict=True))
    return out, lse


def _by_a_kernel(
    q: jax.Array, pool: jax.Array, pages: jax.Array, seen: jax.Array, value_width: int, chip: str | None
) -> tuple[jax.Array, jax.Array] | None:
    """By the first kernel that takes it; by the oracle where there is no GPU; None where every kernel refuses."""
    target = target_chip(chip)
    for backend in kernels.order_of(target, q.shape[1], fp8=is_fp8(pool))[:-1] if target else ("ref",):
        try:
            return kernels.mla_decode(q, pool, pages, seen, value_width=value_width, backend=backend, chip=chip)
        except NotImplementedError:
            continue
    return None


def _tiles_by_a_kernel(
    q: jax.Array, pool: jax.Array, pages: jax.Array, seen: jax.Array, tile: int, value_width: int, chip: str | None
) -> tuple[jax.Array, jax.Array] | None:
    """Tile by tile or row by row, whichever the cost rule finds cheaper; None where there is no GPU or it refuses."""
    target = target_chip(chip)
    if target is None:
        return None
    (rows, heads, columns), tiles = q.shape, pages.shape[0]
    call = Call(
        rows=rows, sequences=tiles, keys=pages.shape[1] * pool.shape[1], tile=tile, heads=heads, latent=value_width,
        rotary=columns - value_width, nope=0, value=0, fp8=is_fp8(pool),
    )  # fmt: skip
    if tiles_or_rows(call, target) == "rows":
        return _by_a_kernel(q, pool, jnp.repeat(pages, tile, 0), seen, value_width, chip)
    try:
        return prefill.mla_prefill(
            q, pool, pages, seen, tile=tile, value_width=value_width, backend="triton", chip=target
        )
    except NotImplementedError:
        return None


def visible_tokens(positions: jax.Array, table: PageTable, shares: int, interleave: int) -> jax.Array:
    """i32[R]: how many of the keys held here stand at or before each row's position; they are the first ones held."""
    run = positions // interleave  # the run of `interleave` positions that the row's own is in
    before = jnp.maximum(0, -(-(run - table.lag) // shares)) * interleave
    here = jnp.where((run % shares == table.lag) & (positions >= 0), positions % interleave + 1, 0)
    return jnp.clip(before + here, 0, table.held)
