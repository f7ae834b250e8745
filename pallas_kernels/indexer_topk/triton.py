"""Logits of the lightning indexer for every GPU the Triton backend compiles for, then the exact selection of `topk`.

A program takes a span of a sequence's tokens and a few query rows of it. Tokens are the rows of its products, so that
the sum over index heads stays within a warp; a key is read once for all heads and rows.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.formats import GROUP, fp8_views, is_fp8
from pallas_kernels.indexer_topk.topk import SelectConfig, top_k
from pallas_kernels.launch import refuse_sizes, refuse_stored, triton_call
from pallas_kernels.mla_decode.triton import load_rows


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsConfig:
    """One point of the tuning space."""

    block_tokens: int
    blocks: int  # of tokens that a program takes, one after another
    rows: int  # query rows of one sequence that share a key, at most
    warps: int
    stages: int  # blocks of tokens in flight
    fp8_products: bool  # multiply FP8 as it is, else as float16, which holds every e4m3 number


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TritonConfig:
    """Of both kernels."""

    logits: LogitsConfig
    select: SelectConfig


def choose(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    lengths: jax.Array,
    *,
    k: int,
    config: TritonConfig,
    interpret: bool = False,
) -> jax.Array:
    """See `api.indexer_topk`. Refuses as `logits` and `top_k` do."""
    found = logits(q, weights, pool, pages, lengths, config=config.logits, interpret=interpret)
    return top_k(found, lengths, k=k, config=config.select, interpret=interpret)


def logits(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    lengths: jax.Array,
    *,
    config: LogitsConfig,
    interpret: bool = False,
) -> jax.Array:
    """f32[R, W * K] of the first `lengths` tokens of each row; what stands behind them means nothing.

    Refuses widths as `refuse_sizes` does and keys as `refuse_stored`, FP8 keys of more than one scale, and queries
    stored otherwise than keys.
    """
    (R, J, C), (S, W), page_size = q.shape, pages.shape, pool.shape[1]
    refuse_sizes({"index heads' width": C, "block of tokens": config.block_tokens})
    if is_fp8(pool) and GROUP != C:
        raise NotImplementedError(f"FP8 keys with one scale are {GROUP} wide, not {C}: several leave no common factor.")
    if q.dtype != (jnp.float8_e4m3fn if is_fp8(pool) else pool.dtype):
        raise NotImplementedError(
            f"{q.dtype} queries with {'FP8' if is_fp8(pool) else pool.dtype} keys: store both alike."
        )
    refuse_stored("keys", pool.dtype, interpret=interpret)
    pools = tuple(fp8_views(pool)[:2]) if is_fp8(pool) else (pool,)
    if is_fp8(pool) and not config.fp8_products:
        q = q.astype(jnp.float16)
    heads = max(16, 1 << (J - 1).bit_length())
    q = jnp.pad(q, ((0, 0), (0, heads - J), (0, 0)))
    weights = jnp.pad(weights.astype(jnp.float32), ((0, 0), (0, heads - J)))
    rows, tile = math.gcd(config.rows, R // S), R // S
    tokens = W * page_size
    kernel = functools.partial(_logits_kernel, page_size=page_size, rows=rows, tile=tile, config=config)
    (found,) = triton_call(
        kernel,
        grid=(R // rows, pl.cdiv(tokens, config.block_tokens * config.blocks)),  # rows of a sequence side by side
        out_shape=[jax.ShapeDtypeStruct((R, tokens), jnp.float32)],
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
        name="indexer_topk_logits",
    )(lengths, pages, q, weights, *pools)
    return found


def _logits_kernel(
    lengths: Any, pages: Any, q: Any, weights: Any, *refs: Any, page_size: int, rows: int, tile: int, config: Any
) -> None:
    *pools, out = refs
    L = config.block_tokens
    first = pl.program_id(0) * rows
    sequence = first // tile
    longest = functools.reduce(jnp.maximum, [lengths[first + t] for t in range(rows)])
    begin = pl.program_id(1) * config.blocks
    end = jnp.minimum(begin + config.blocks, pl.cdiv(longest, L))
    places = lax.broadcasted_iota(jnp.int32, (L,), 0)
    q_TJC = [pltriton.load(q.at[first + t]) for t in range(rows)]
    w_TJ = [pltriton.load(weights.at[first + t]) for t in range(rows)]

    def block(i: jax.Array, carry: jax.Array) -> jax.Array:
        token = i * L + places
        mine = token < longest
        page = pltriton.load(pages.at[sequence, token // page_size], mask=mine, other=0)
        k_LC, scale_L = _keys(pools, page, token % page_size, mine, q.shape[-1])
        k_LC = k_LC.astype(q.dtype)
        for t in range(rows):
            dots_LJ = pltriton.dot(k_LC, q_TJC[t].T)
            logits_L = (jnp.maximum(dots_LJ, 0.0) * w_TJ[t][None]).sum(1)
            logits_L = logits_L if scale_L is None else logits_L * scale_L
            pltriton.store(out.at[first + t, token], logits_L, mask=mine)
        return carry

    lax.fori_loop(begin, end, block, jnp.int32(0))


def _keys(
    pools: list[Any], page: jax.Array, slot: jax.Array, mine: jax.Array, width: int
) -> tuple[jax.Array, jax.Array | None]:
    """The keys at each (page, slot), zeros where not `mine`, and the scales of FP8 ones, whose relu they pass."""
    k_LC = load_rows(pools[0], page, slot, mine, 0, width)
    if len(pools) == 1:
        return k_LC, None
    column = jnp.full_like(page, width // 4)
    return k_LC, pltriton.load(pools[1].at[page, slot, column], mask=mine, other=0.0)
