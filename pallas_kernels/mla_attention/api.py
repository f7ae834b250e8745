"""Entry point of the op: shapes, and which implementation serves them.

Letters: R rows, S sequences, H heads, D latent + rotary width, V latent width, W pages per sequence, P pages.
"""

from functools import partial

import jax

from pallas_kernels.checks import check_latents, check_pages, check_queries, indices, within_table
from pallas_kernels.formats import is_fp8
from pallas_kernels.mla_attention import gpu, ref, xla
from pallas_kernels.mla_attention.heads import HeadWeights, absorb, unabsorb
from pallas_kernels.mla_attention.table import PageTable
from pallas_kernels.mla_decode.work import Work

IMPLEMENTATIONS = {"gpu": gpu.attend, "xla": xla.attend, "ref": ref.attend}


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
    heads: HeadWeights | None = None,
    prompts: jax.Array | None = None,
    work: Work | None = None,
    backend: str = "xla",
    chip: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention over the keys held here.

    Args:
      q: [R, H, D], absorbed and scaled; with `heads` [R, H, N + rotary width], scaled. R = decode + tiles * tile.
      positions: i32[R]; a row at position -1 is padding and sees nothing.
      pool: [P, page_size, D] of q's dtype, or unsigned words as wide that hold its bits; keys are whole rows, values
        their first `value_width` columns. Pages and slots beyond `held` are never read as numbers: they may hold NaN.
      heads: how keys and values of the heads are made of latents; with it a kernel may expand them for prompt rows.
      prompts: i32[tiles]: the first tile of the same sequence, for each; None where every tile is its own sequence's.
      work: of the decode rows, as `plan_decode` cuts what they see; "gpu" makes it where it is None or a kernel serves
        that takes other blocks.
      backend: "gpu" takes decode rows to `mla_decode` and tiles to `mla_prefill`, which choose kernels for the GPU that
        there is; "xla" compiles for every platform; "ref" is the oracle.
      chip: the GPU that "gpu" chooses for, as `mla_decode` names it; None is the default device's.
      table: see `PageTable`; decode = S - tiles follows from the shapes.

    Returns f32[R, H, V] and its log-sum-exp, base e, f32[R, H]; with `heads` its values, as wide as `w_uv` makes them.
    (0, -inf) for a row that sees nothing here.
    Raises ValueError for shapes that contradict each other, NotImplementedError where the named backend refuses.
    """
    positions, pages, held, lag = indices(positions=positions, pages=table.pages, held=table.held, lag=table.lag)
    if backend not in IMPLEMENTATIONS:
        raise ValueError(f"mla_attention has no backend {backend!r}; it has: {', '.join(IMPLEMENTATIONS)}.")
    columns = q.shape[2]
    if heads is not None:
        (H, C, N), rotary = heads.w_uk.shape, pool.shape[-1] - value_width
        columns += value_width - N
        other = not is_fp8(pool) and N + rotary != q.shape[2]
        if other or heads.w_uv.shape[::2] != (H, C) or (q.shape[1], value_width) != (H, C):
            raise ValueError(
                f"queries {list(q.shape)} over {value_width} latent and {rotary} rotary columns do not go with w_uk "
                f"{list(heads.w_uk.shape)} and w_uv {list(heads.w_uv.shape)}."
            )
    if backend != "xla":  # which reads a few pages at a time, and so turns no more than these to numbers
        pool = xla.as_numbers(pool, q.dtype)
    rows, seqs = q.shape[0], pages.shape[0]
    check_queries(rows, q.shape[1])
    check_pages(pool, pages)
    numbers = jax.eval_shape(lambda words: xla.as_numbers(words, q.dtype), pool)
    check_latents(numbers, columns, value_width)
    if positions.shape != (rows,) or held.shape != (seqs,) or lag.shape != (seqs,):
        raise ValueError(
            f"{rows} rows and {seqs} sequences, but {list(positions.shape)} positions, {list(held.shape)} lengths and "
            f"{list(lag.shape)} lags."
        )
    if shares < 1 or interleave < 1:
        raise ValueError(f"positions are dealt out over {shares} shares in runs of {interleave}: give both 1 or more.")
    table = PageTable(pages, within_table(held, pool, pages), lag)
    tiles = (rows - seqs) // (tile - 1) if tile > 1 else 0
    if rows != seqs - tiles + tiles * tile:
        raise ValueError(f"{rows} rows and {seqs} sequences do not split into tiles of {tile} rows.")
    static = {
        "decode": seqs - tiles, "tile": tile, "value_width": value_width, "shares": shares, "interleave": interleave,
    }  # fmt: skip
    if backend == "gpu":
        return gpu.attend(q, positions, pool, table, heads=heads, prompts=prompts, work=work, chip=chip, **static)
    attend = partial(IMPLEMENTATIONS[backend], positions=positions, pool=pool, table=table, **static)
    if heads is None:
        return attend(q)
    out, lse = attend(absorb(q, heads.w_uk))
    return unabsorb(out, heads.w_uv), lse
