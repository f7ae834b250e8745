"""Decode rows by the kernels of `mla_decode`, prompt tiles by those of `mla_prefill`; by XLA what they refuse."""

from collections.abc import Callable
from contextlib import suppress

import jax
import jax.numpy as jnp

import pallas_kernels.mla_decode as kernels
import pallas_kernels.mla_prefill as prefill
from pallas_kernels.chip import target_chip
from pallas_kernels.formats import is_fp8
from pallas_kernels.mla_attention import xla
from pallas_kernels.mla_attention.heads import HeadWeights, absorb, unabsorb
from pallas_kernels.mla_attention.table import PageTable
from pallas_kernels.mla_decode.work import Work
from pallas_kernels.mla_prefill.account import Call, tiles_or_rows

Found = tuple[jax.Array, jax.Array]  # what attention returns


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
    heads: HeadWeights | None = None,
    prompts: jax.Array | None = None,
    work: Work | None = None,
    chip: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.mla_attention`. What no kernel takes goes to XLA, and prompt tiles where there is no GPU."""
    static = {"tile": tile, "value_width": value_width, "shares": shares, "interleave": interleave}

    def over_latents(attend: Callable[[jax.Array], Found | None], q: jax.Array) -> Found | None:
        found = attend(q if heads is None else absorb(q, heads.w_uk))
        return found if heads is None or found is None else (unabsorb(found[0], heads.w_uv), found[1])

    parts = []
    if decode:
        own = jax.tree.map(lambda x: x[:decode], table)
        seen = visible_tokens(positions[:decode], own, shares, interleave)

        def rows(q: jax.Array) -> Found:
            part = _by_a_kernel(q, pool, own.pages, seen, value_width, chip, work)
            return part or xla.attend(q, positions[:decode], pool, own, decode=decode, **static)

        parts.append(over_latents(rows, q[:decode]))
    if decode < q.shape[0]:
        rest = jax.tree.map(lambda x: x[decode:], table)
        by_row = PageTable(rest.pages, jnp.repeat(rest.held, tile), jnp.repeat(rest.lag, tile))
        seen = visible_tokens(positions[decode:], by_row, shares, interleave)

        def row_by_row(q: jax.Array) -> Found | None:
            return _by_a_kernel(q, pool, jnp.repeat(rest.pages, tile, 0), seen, value_width, chip)

        def by_xla(q: jax.Array) -> Found:
            return xla.attend(q, positions[decode:], pool, rest, decode=0, **static)

        rotary = q.shape[2] - (heads.w_uk.shape[2] if heads else value_width)
        together = _together((q.shape[0] - decode, q.shape[1]), pool, rest.pages, tile, (value_width, rotary), chip)
        part = None
        if together:
            with suppress(NotImplementedError):
                part = prefill.mla_prefill(
                    q[decode:], pool, rest.pages, seen, tile=tile, value_width=value_width, sequence=prompts,
                    backend="triton", chip=chip, **(heads._asdict() if heads else {}),
                )  # fmt: skip
        elif together is not None:
            part = over_latents(row_by_row, q[decode:])
        parts.append(part or over_latents(by_xla, q[decode:]))
    out, lse = (jnp.concatenate(both) for both in zip(*parts, strict=True))
    return out, lse


def _by_a_kernel(
    q: jax.Array, pool: jax.Array, pages: jax.Array, seen: jax.Array, value_width: int, chip: str | None,
    work: Work | None = None,
) -> tuple[jax.Array, jax.Array] | None:  # fmt: skip
    """By the first kernel that takes it; by the oracle where there is no GPU; None where every kernel refuses."""
    target = target_chip(chip)
    if target is None:
        return kernels.mla_decode(q, pool, pages, seen, value_width=value_width, backend="ref")
    for backend in kernels.order_of(target, q.shape[1], fp8=is_fp8(pool))[:-1]:
        with suppress(NotImplementedError):
            known = work and kernels.fits(work, heads=q.shape[1], fp8=is_fp8(pool), backend=backend, chip=target)
            return kernels.mla_decode(
                q, pool, pages, seen, value_width=value_width, backend=backend, chip=chip, work=work if known else None
            )
    return None


def _together(
    queries: tuple[int, int], pool: jax.Array, pages: jax.Array, tile: int, widths: tuple[int, int], chip: str | None
) -> bool | None:
    """Whether (rows, heads) of tiles are cheaper together than each row for itself; None where there is no GPU."""
    target = target_chip(chip)
    if target is None:
        return None
    call = Call(
        rows=queries[0], sequences=pages.shape[0], keys=pages.shape[1] * pool.shape[1], tile=tile, heads=queries[1],
        latent=widths[0], rotary=widths[1], nope=0, value=0, fp8=is_fp8(pool),
    )  # fmt: skip
    return tiles_or_rows(call, target) == "tiles"


def visible_tokens(positions: jax.Array, table: PageTable, shares: int, interleave: int) -> jax.Array:
    """i32[R]: how many of the keys held here stand at or before each row's position; they are the first ones held."""
    run = positions // interleave  # the run of `interleave` positions that the row's own is in
    before = jnp.maximum(0, -(-(run - table.lag) // shares)) * interleave
    here = jnp.where((run % shares == table.lag) & (positions >= 0), positions % interleave + 1, 0)
    return jnp.clip(before + here, 0, table.held)
