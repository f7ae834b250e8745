"""Entry points of the op: shapes, and which implementation serves them.

Letters: R rows, J index heads, C their width, S sequences, W pages per sequence, P pages, N columns.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_pages, check_queries, check_stored, indices, within_table
from pallas_kernels.chip import known_chip, target_chip
from pallas_kernels.formats import FP8_MAX, is_fp8
from pallas_kernels.indexer_topk import ref, topk, triton
from pallas_kernels.indexer_topk.topk import SelectConfig
from pallas_kernels.indexer_topk.triton import LogitsConfig, TritonConfig
from pallas_kernels.select import run_first
from pallas_kernels.tuning import entry_for

IMPLEMENTATIONS = {"triton": triton.choose, "ref": ref.choose}


def indexer_topk(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    lengths: jax.Array,
    *,
    k: int,
    backend: str | None = None,
    chip: str | None = None,
    config: TritonConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The k tokens that the lightning indexer of DeepSeek-V3.2 gives every row: of the largest

        I[r, s] = sum over j of weights[r, j] * relu(q[r, j] . key[s]),

    in float32, exactly: of equal ones the first in the sequence. All logits of the call lie in memory at once, 4 bytes
    for each row and column of `pages`: cut the rows of long prompts.

    Args:
      q: [R, J, C] as the keys are stored: BF16 for a BF16 pool, float8_e4m3fn for an FP8 one (`quantize_queries`).
      weights: f32[R, J], with every constant factor and the scales of FP8 queries in them.
      pool: [P, page_size, C]; or u8[P, page_size, C + 4 * (C / 128)], as `mla_decode.pack_fp8(keys, C)` makes them: 132
        bytes a token. Tokens at and beyond a sequence's longest row are never read as numbers: they may hold NaN.
      pages: i32[S, W], R a multiple of S: row r belongs to sequence r // (R // S), whose token t lies in page
        pages[.., t // page_size], slot t % page_size. Decodes have S = R, a tile of prompt rows S = 1.
      lengths: i32[R]: row r sees the first of so many tokens (its position + 1); 0 for padding.
      k: 2,048 in DeepSeek-V3.2.
      backend: one of IMPLEMENTATIONS; None takes the first that accepts.
      chip: a key of CHIPS that the program is compiled for; None is the default device's. "ref" where that is none.
      config: the kernels' configuration; None is the tuning table's.
      interpret: run the kernels without a GPU, slowly.

    Returns i32[R, k]: positions in ascending order, -1 behind them where a row sees fewer than k tokens.
    Raises ValueError for shapes that contradict each other, NotImplementedError where the named backend refuses.
    """
    pages, lengths = indices(pages=pages, lengths=lengths)
    _check(q, weights, pool, pages, lengths, k)
    target = target_chip(chip)

    def by_triton(*args: Any) -> jax.Array:
        chosen = config or config_for(known_chip(target, "triton"), "fp8" if is_fp8(pool) else "plain", q.shape[1])
        return triton.choose(*args, k=k, config=chosen, interpret=interpret)

    implementations = {"triton": by_triton, "ref": lambda *args: ref.choose(*args, k=k)}
    order = ("ref",) if target is None else ("triton", "ref")
    lengths = within_table(lengths, pool, pages)
    return run_first("indexer_topk", implementations, order, backend)(q, weights, pool, pages, lengths)


def top_k(
    logits: jax.Array,
    lengths: jax.Array,
    *,
    k: int,
    backend: str = "ref",
    config: SelectConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Columns of the k largest of the first `lengths` of each row of f32[R, N]: i32[R, k], ascending, -1 behind them.

    Of equal ones the first; -0.0 equals 0.0. NaN is never taken. Columns are of `lengths` 0 to N: cut to that.
    """
    (lengths,) = indices(lengths=lengths)
    if logits.ndim != 2 or lengths.shape != logits.shape[:1] or logits.dtype != jnp.float32 or k < 1:
        raise ValueError(
            f"k = {k} of {logits.dtype}{list(logits.shape)} with lengths {list(lengths.shape)}: give k >= 1, "
            "float32[rows, columns] and one length a row."
        )
    if backend not in IMPLEMENTATIONS:
        raise ValueError(f"top_k has no backend {backend!r}; it has: {', '.join(IMPLEMENTATIONS)}.")
    lengths = jnp.clip(lengths, 0, logits.shape[1])
    if backend == "ref":
        return ref.top_k(logits, lengths, k=k)
    if config is None:
        raise ValueError("triton needs a SelectConfig: give config=, such as config_for(chip, rows, heads).select.")
    return topk.top_k(logits, lengths, k=k, config=config, interpret=interpret)


def quantize_queries(q: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[R, J, C] as float8_e4m3fn, each head scaled so that its largest element is FP8's largest, and f32[R, J] weights
    that undo it: a positive scale passes through the relu.
    """
    scales = jnp.maximum(jnp.abs(q.astype(jnp.float32)).max(-1), 1e-30) / FP8_MAX
    return (q.astype(jnp.float32) / scales[..., None]).astype(jnp.float8_e4m3fn), weights.astype(jnp.float32) * scales


def config_for(chip: str, rows: str, heads: int) -> TritonConfig:
    """The tuning table's configuration: for "plain" or "fp8" keys, and index heads."""
    found = entry_for("indexer_topk", chip, "triton", rows, heads)["config"]
    return TritonConfig(logits=LogitsConfig(**found["logits"]), select=SelectConfig(**found["select"]))


def _check(q: jax.Array, weights: jax.Array, pool: jax.Array, pages: jax.Array, lengths: jax.Array, k: int) -> None:
    (R, J, C), S = q.shape, pages.shape[0]
    check_queries(R, J)
    check_stored("index heads", "keys", pool, C, C)
    if weights.shape != (R, J) or lengths.shape != (R,):
        raise ValueError(f"{R} rows of {J} heads, but weights {weights.shape} and lengths {lengths.shape}.")
    if S == 0 or R % S:
        raise ValueError(f"{R} query rows are no equal shares of {S} sequences with pages: pad every tile to one size.")
    check_pages(pool, pages)
    if k < 1:
        raise ValueError(f"the indexer selects k = {k} tokens: give at least 1.")
