"""Entry point of the op: shapes, and which implementation serves them.

Letters: R rows, H heads, D latent + rotary width, V latent width, K selected tokens a row, S sequences, W pages per
sequence, P pages.
"""

from typing import Any

import jax

from pallas_kernels.checks import check_latents, check_pages, check_queries, indices
from pallas_kernels.chip import known_chip, target_chip
from pallas_kernels.formats import is_fp8
from pallas_kernels.mla_decode.triton import TritonConfig
from pallas_kernels.mla_decode.work import Work
from pallas_kernels.select import run_first
from pallas_kernels.sparse_mla import ref, triton
from pallas_kernels.tuning import entry_for

IMPLEMENTATIONS = {"triton": triton.attend, "ref": ref.attend}


def sparse_mla(
    q: jax.Array,
    pool: jax.Array,
    selected: jax.Array,
    pages: jax.Array,
    *,
    value_width: int,
    backend: str | None = None,
    chip: str | None = None,
    config: TritonConfig | None = None,
    work: Work | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of absorbed MLA queries over the tokens selected for each: the sparse attention of DeepSeek-V3.2.

    A row is a query of one token, of a decode or of a prompt; what it may see is what is selected for it.

    Args:
      q: [R, H, D], absorbed and scaled.
      pool: [P, page_size, D], rows whose first V columns are the values too; or u8[P, page_size, bytes], FP8 rows as
        `pack_fp8` makes them (656 bytes for 512 + 64). Only the selected tokens are read: all others may hold NaN.
      selected: i32[R, K], any K: positions in the row's sequence, in any order, as `indexer_topk` gives them. A number
        outside [0, W * page_size), as -1, selects nothing. No token may stand twice in a row: it would count twice.
      pages: i32[S, W], R a multiple of S: row r belongs to sequence r // (R // S), whose token t lies in page
        pages[.., t // page_size], slot t % page_size. Decodes have S = R, a tile of prompt rows S = 1.
      value_width: V.
      backend: one of IMPLEMENTATIONS; None takes the first that accepts.
      chip: a key of CHIPS that the program is compiled for; None is the default device's. "ref" where that is none.
      config: the kernel's configuration; None is the tuning table's.
      work: what `plan_sparse` made for the same configuration; None makes it here.
      interpret: run the kernel without a GPU, slowly.

    Returns f32[R, H, V] and its log-sum-exp, base e, f32[R, H]; (0, -inf) for a row without a token.
    Raises ValueError for shapes that contradict each other, NotImplementedError where the named backend refuses.
    """
    selected, pages = indices(selected=selected, pages=pages)
    _check(q, pool, selected, pages, value_width)
    if work is not None and work.first.shape[0] != q.shape[0] + 1:
        raise ValueError(f"work was cut for {work.first.shape[0] - 1} rows, but there are {q.shape[0]} queries.")
    target = target_chip(chip)

    def by_triton(*args: Any) -> tuple[jax.Array, jax.Array]:
        chosen = config or config_for(known_chip(target, "triton"), "fp8" if is_fp8(pool) else "plain", q.shape[1])
        if work is not None and (work.block, work.workers) != (chosen.block_tokens, chosen.workers):
            raise ValueError(
                f"work was cut in blocks of {work.block} for {work.workers} workers, but the kernel takes "
                f"{chosen.block_tokens} and {chosen.workers} here: plan it with the same arguments."
            )
        return triton.attend(*args, value_width=value_width, config=chosen, work=work, interpret=interpret)

    implementations = {"triton": by_triton, "ref": lambda *args: ref.attend(*args, value_width=value_width)}
    order = ("ref",) if target is None else ("triton", "ref")
    return run_first("sparse_mla", implementations, order, backend)(q, pool, selected, pages)


def plan_sparse(counts: jax.Array, *, heads: int, fp8: bool, chip: str | None = None) -> Work:
    """Work for `sparse_mla` over i32[R] lists whose first `counts` columns hold all their tokens.

    With `indexer_topk` that is min(length, k) of each row in every layer: worth making once per step.
    """
    return triton.plan(counts, config_for(known_chip(target_chip(chip), "triton"), "fp8" if fp8 else "plain", heads))


def config_for(chip: str, rows: str, heads: int) -> TritonConfig:
    """The tuning table's configuration: for "plain" or "fp8" rows, and heads per rank."""
    return TritonConfig(**entry_for("sparse_mla", chip, "triton", rows, heads)["config"])


def _check(q: jax.Array, pool: jax.Array, selected: jax.Array, pages: jax.Array, value_width: int) -> None:
    (R, H, D), S = q.shape, pages.shape[0]
    check_queries(R, H)
    check_latents(pool, D, value_width)
    if selected.ndim != 2 or selected.shape[0] != R or not selected.shape[1]:
        raise ValueError(f"{R} query rows, but tokens selected in shape {selected.shape}: give one list for each row.")
    if S == 0 or R % S:
        raise ValueError(f"{R} query rows are no equal shares of {S} sequences with pages: pad every tile to one size.")
    check_pages(pool, pages)
