"""Entry point of the op: shapes, and which implementation serves them.

Letters: R rows, S sequences, H heads, D latent + rotary width, V latent width, W pages per sequence, P pages.
"""

from typing import NamedTuple

import jax

from pallas_kernels.mla_attention import ref, xla


class PageTable(NamedTuple):
    """Where the keys of every sequence lie on this rank.

    Sequences come in two runs: `decode` of them with one query row each, then tiles of `tile` rows, each tile of one
    sequence. Local key `l` of a sequence stands at position `(l // interleave * shares + lag) * interleave +
    l % interleave` and lies in page `pages[l // page_size]`.
    """

    pages: jax.Array  # i32[S, W]
    held: jax.Array  # i32[S]: keys of the sequence on this rank
    lag: jax.Array  # i32[S]: 0 <= lag < shares


IMPLEMENTATIONS = {"xla": xla.attend, "ref": ref.attend}


def mla_attention(
    q: jax.Array,
    positions: jax.Array,
    pool: jax.Array,
    table: PageTable,
    *,
    value_width: int,
    tile: int,
    shares: int,
    interleave: int,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Causal attention over the keys held here.

    Args:
      q: [R, H, D], absorbed and scaled; R = decode + tiles * tile.
      positions: i32[R]; a row at position -1 is padding and sees nothing.
      pool: [P, page_size, D]; keys are whole rows, values their first `value_width` columns. Pages and slots beyond
        `held` are never read as numbers: they may hold NaN.
      table: see `PageTable`; decode = S - tiles follows from the shapes.

    Returns f32[R, H, V] and its log-sum-exp, base e, f32[R, H]; (0, -inf) for a row that sees nothing here.
    """
    rows, seqs = q.shape[0], table.pages.shape[0]
    tiles = (rows - seqs) // (tile - 1) if tile > 1 else 0
    if rows != seqs - tiles + tiles * tile:
        raise ValueError(f"{rows} rows and {seqs} sequences do not split into tiles of {tile} rows.")
    return IMPLEMENTATIONS[backend](
        q,
        positions,
        pool,
        table,
        decode=seqs - tiles,
        tile=tile,
        value_width=value_width,
        shares=shares,
        interleave=interleave,
    )
