"""The expanded form: keys and values made per head from the latents, a chunk at a time, then narrow flash attention.

A key of a head costs 2 C (N + V) FLOPs to make, once for all the rows of its sequence; a row's logit and value then
take 2 (N + R + V) instead of the absorbed 2 (2 C + R). XLA makes them, outside the kernel: a program of the kernel has
one head and a block of rows, and would make them again for every such block, while one matrix product makes them once
at the full rate. The keys of all sequences go into chunks of one size, block after block, so that no sequence's end is
padded by more than a block, and one program serves every mix of lengths; the parts are merged as they come.
"""

import functools
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.formats import is_fp8, unpack_fp8
from pallas_kernels.launch import refuse_sizes, refuse_stored, triton_call
from pallas_kernels.tiles import Part, Parts, online_softmax


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedConfig:
    """One point of the tuning space."""

    block_rows: int  # of one tile and head, that a program takes
    block_tokens: int
    warps: int
    stages: int  # blocks of tokens in flight
    chunk_tokens: int  # whose keys and values are made at once, for all heads: the size of the workspace

    def workspace_bytes(self, heads: int, nope: int, value: int) -> int:
        """Of one chunk's keys and values in BF16, rotary keys left out."""
        return 2 * self.chunk_tokens * heads * (nope + value)


def attend(
    q: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    sequence: jax.Array,
    seen: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    *,
    tile: int,
    config: ExpandedConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.mla_prefill`."""
    (rows, H, D), S = q.shape, pages.shape[0]
    C, N = w_uk.shape[1:]
    V, rotary, L = w_uv.shape[1], D - N, config.block_tokens
    M = min(config.block_rows, tile)
    refuse_sizes({"key width": N, "rotary width": rotary, "value width": V, "tile": tile, "block of tokens": L})
    if tile % M or config.chunk_tokens % L or config.chunk_tokens < L:
        raise NotImplementedError(
            f"blocks are taken whole: tiles of {tile} rows in blocks of {M}, chunks of {config.chunk_tokens} tokens in "
            f"blocks of {L}."
        )
    refuse_stored("rows", pool.dtype, interpret=interpret)
    cast = jnp.bfloat16 if is_fp8(pool) else pool.dtype
    T, blocks = sequence.shape[0], config.chunk_tokens // L
    seen_TQ = seen.reshape(T, tile)
    held = tokens_seen(seen, sequence, S, tile)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-held // L)).astype(jnp.int32)])
    call = _flash((rows, H, V), (T, tile // M), (N, rotary), M=M, config=config, blocks=blocks, interpret=interpret)
    q, w_uk, w_uv = q.astype(cast), w_uk.astype(cast), w_uv.astype(cast)

    def chunk(c: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        latent_XD = _gather(pool, pages, held, first, c * blocks, blocks, L, C).astype(cast)
        k_HXN = jnp.einsum("xc,hcn->hxn", latent_XD[:, :C], w_uk)
        v_HXV = jnp.einsum("xc,hvc->hxv", latent_XD[:, :C], w_uv)
        mine = first[sequence] - c * blocks  # where the tile's sequence begins, in blocks of this chunk
        end = jnp.minimum(first[sequence + 1] - c * blocks, blocks)
        span = jnp.stack([mine, jnp.maximum(mine, 0), end], -1).astype(jnp.int32)
        return tuple(call(span, seen_TQ, q, k_HXN, latent_XD[:, C:], v_HXV, *carry))

    start = (jnp.zeros((rows, H, V), jnp.float32), jnp.full((rows, H), -jnp.inf, jnp.float32))
    return lax.fori_loop(0, -(-first[-1] // blocks), chunk, start)


def tokens_seen(seen: jax.Array, sequence: jax.Array, sequences: int, tile: int) -> jax.Array:
    """i32[S]: the tokens of every sequence that any of its rows sees."""
    return jax.ops.segment_max(seen.reshape(-1, tile).max(1), sequence, sequences).clip(0)


def tokens_made(held: jax.Array, config: ExpandedConfig) -> jax.Array:
    """f32[]: tokens whose keys are made for sequences of `held` i32[S] tokens: whole blocks, in whole chunks."""
    blocks = (-(-held // config.block_tokens)).sum()
    chunks = -(-blocks // (config.chunk_tokens // config.block_tokens))
    return chunks.astype(jnp.float32) * config.chunk_tokens


def _gather(
    pool: jax.Array, pages: jax.Array, held: jax.Array, first: jax.Array, begin: jax.Array, blocks: int, L: int, C: int
) -> jax.Array:
    """[blocks * L, D]: the rows of `blocks` blocks from `begin` of all sequences' blocks; zeros beyond a sequence."""
    block = begin + jnp.arange(blocks, dtype=jnp.int32)
    s = jnp.minimum((first[None, 1:] <= block[:, None]).sum(1, dtype=jnp.int32), pages.shape[0] - 1)
    token = (block - first[s])[:, None] * L + jnp.arange(L, dtype=jnp.int32)[None]
    some = (token < held[s][:, None]).reshape(-1)
    at = jnp.minimum(token // pool.shape[1], pages.shape[1] - 1)
    own = pool[pages[s[:, None], at], token % pool.shape[1]].reshape(blocks * L, -1)
    own = jnp.where(some[:, None], own, jnp.zeros((), own.dtype))
    return unpack_fp8(own[None], C)[0] if is_fp8(pool) else own


def _flash(
    shape: tuple[int, int, int], tiles: tuple[int, int], widths: tuple[int, int], *, M: int, config: ExpandedConfig,
    blocks: int, interpret: bool,
) -> Any:  # fmt: skip
    """The kernel of one chunk: from (spans, seen, q, keys, rotary keys, values, out, lse) to out and lse with it."""
    rows, H, V = shape
    return triton_call(
        functools.partial(_kernel, widths=widths, value_width=V, M=M, L=config.block_tokens),
        grid=(tiles[1], H, tiles[0]),  # the row blocks of a head run side by side and share its keys in L2
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((rows, H), jnp.float32)],
        aliases={6: 0, 7: 1},
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
        name="mla_prefill_expanded",
    )


def _kernel(
    span: Any, seen: Any, q: Any, k: Any, rope: Any, v: Any, _out: Any, _lse: Any, out: Any, lse: Any,
    *, widths: tuple[int, int], value_width: int, M: int, L: int,
) -> None:  # fmt: skip
    nth, head, tile = (pl.program_id(i) for i in range(3))
    N, rotary = widths
    base, begin, end = (span[tile, i] for i in range(3))
    limit_M = pltriton.load(seen.at[tile, pl.ds(nth * M, M)])
    own = pl.ds(tile * seen.shape[1] + nth * M, M)
    end = jnp.minimum(end, base + lax.div(limit_M.max(0) + L - 1, L))
    tokens = lax.broadcasted_iota(jnp.int32, (L,), 0)

    @pl.when(begin < end)
    def _() -> None:
        queries = [pltriton.load(q.at[own, head, pl.ds(a, w)]) for a, w in ((0, N), (N, rotary))]

        def keys(i: jax.Array) -> tuple[Parts, Parts]:
            at = pl.ds(i * L, L)
            k_LN = pltriton.load(k.at[head, at, pl.ds(0, N)])
            k_LR = pltriton.load(rope.at[at, pl.ds(0, rotary)])
            v_LV = pltriton.load(v.at[head, at, pl.ds(0, value_width)])
            return [Part(k_LN), Part(k_LR)], [Part(v_LV)]

        (part,), part_lse = online_softmax(queries, keys, limit_M + base * L, begin, end, tokens, (value_width,))
        before = pltriton.load(lse.at[own, head])
        top = jnp.maximum(jnp.maximum(before, part_lse), -1e30)
        old, new = jnp.exp(before - top), jnp.exp(part_lse - top)
        total = jnp.where(old + new != 0, old + new, 1.0)
        at = (own, head, pl.ds(0, value_width))
        merged = (pltriton.load(out.at[at]) * old[:, None] + part * new[:, None]) / total[:, None]
        pltriton.store(out.at[at], merged)
        pltriton.store(lse.at[own, head], jnp.where(old + new != 0, top + jnp.log(total), -jnp.inf))
