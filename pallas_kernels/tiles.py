"""Flash attention of tiles of query rows over paged keys, in Triton: what mla_prefill and gqa_attention share.

The rows of a tile are of one sequence, so they share its keys, and so do the query heads of one key head: a tile's rows
and heads are laid out as *lines*, and a program takes a block of lines, enough to fill the tensor cores' 64 rows, over
an item of the tile's history. Few tiles are split over their keys and merged, as in decode; many are not.
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.launch import refuse_sizes, triton_call
from pallas_kernels.mla_decode.triton import Part, merge, scaled
from pallas_kernels.mla_decode.work import WAVES, Work, split_work

LOG2E = math.log2(math.e)
FLOOR = -1e30  # below every logit, so that a line that sees nothing keeps a finite maximum


Parts = list[Part]
# (pools, key head, page, slot, which tokens to read) to a block's keys and values.
Read = Callable[[list[Any], jax.Array, jax.Array, jax.Array, jax.Array], tuple[Parts, Parts]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """One point of the tuning space."""

    block_lines: int  # of a program
    block_tokens: int
    warps: int
    stages: int  # blocks of tokens in flight
    workers: int  # programs that the chip holds at once
    overhead: int = 2  # what an item costs beside its blocks, in blocks

    def plan(self, longest: jax.Array, programs: int) -> Work:
        """Items for tiles whose rows see at most i32[T] tokens, each item taken by `programs` programs.

        One item per tile where the tiles alone give the chip WAVES programs for each that it holds.
        """
        T = longest.shape[0]
        if T * programs < WAVES * self.workers:
            workers = max(1, self.workers // programs)
            return split_work(longest, block=self.block_tokens, workers=workers, overhead=self.overhead)
        tile = jnp.arange(T, dtype=jnp.int32)
        columns = (tile, jnp.zeros_like(tile), -(-longest // self.block_tokens), jnp.ones_like(tile))
        first = jnp.arange(T + 1, dtype=jnp.int32)
        items, turns = jnp.stack(columns, -1), jnp.zeros(0, jnp.int32)
        return Work(items=items, first=first, turns=turns, block=self.block_tokens, workers=self.workers)


def attend_tiles(
    q_TGND: jax.Array,
    pools: tuple[jax.Array, ...],
    pages: jax.Array,
    seen: jax.Array,
    *,
    read: Read,
    widths: tuple[int, ...],
    value_widths: tuple[int, ...],
    config: TileConfig,
    name: str,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of tiles of lines.

    Args:
      q_TGND: T tiles, G key heads, N lines (rows x query heads of a key head, heads fastest), D columns; scaled.
      pools: what `read` reads, pages and slots leading.
      pages: i32[T, W]: of the tile's sequence.
      seen: i32[T, rows of a tile]: how many of the sequence's first tokens a row sees; 0 for padding.
      widths, value_widths: of the parts that `read` gives keys and values in.

    Returns f32[T, G, N, V] and its log-sum-exp, base e, f32[T, G, N]; (0, -inf) for lines that see nothing.
    Refuses blocks as `refuse_sizes` does.
    """
    refuse_sizes({"block of lines": config.block_lines, "block of tokens": config.block_tokens})
    T, G, N, D = q_TGND.shape
    M, value_width = config.block_lines, sum(value_widths)
    padded = -(-N // M) * M
    q = jnp.pad(q_TGND, ((0, 0), (0, 0), (0, padded - N), (0, 0))).reshape(T, G * padded, D)
    longest = seen.max(1)
    work = config.plan(longest, G * padded // M)
    count = work.items.shape[0]
    split = count > T
    shapes = [(T, G * padded, value_width), (T, G * padded)]
    if split:
        shapes += [(count, *shape[1:]) for shape in shapes]
    kernel = functools.partial(
        _kernel, read=read, widths=widths, value_widths=value_widths, heads=N // seen.shape[1], lines=N,
        page_size=pools[0].shape[1], config=config, pools=len(pools),
    )  # fmt: skip
    found = triton_call(
        kernel,
        grid=(G * padded // M, count),  # the blocks of lines of a tile run side by side and share its keys in L2
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
        name=name,
    )(work.items, pages, seen, q, *pools)
    out, lse = merge(work, list(found), interpret, name) if split else found
    return out.reshape(T, G, padded, -1)[:, :, :N], lse.reshape(T, G, padded)[:, :, :N]


def _kernel(
    items: Any, pages: Any, seen: Any, q: Any, *refs: Any, read: Read, widths: tuple[int, ...],
    value_widths: tuple[int, ...], heads: int, lines: int, page_size: int, config: TileConfig, pools: int,
) -> None:  # fmt: skip
    inputs, (out, lse, *parts) = list(refs[:pools]), refs[pools:]
    M, L = config.block_lines, config.block_tokens
    block, item = pl.program_id(0), pl.program_id(1)
    tile, begin, end, alone = (items[item, i] for i in range(4))
    at = jnp.maximum(tile, 0)
    own = pl.ds(block * M, M)  # of the lines of all key heads
    per_group = -(-lines // M)
    line = lax.rem(block, per_group) * M + lax.broadcasted_iota(jnp.int32, (M,), 0)
    mine = line < lines
    limit_M = pltriton.load(seen.at[at, jnp.where(mine, line // heads, 0)], mask=mine, other=0)
    length = limit_M.max(0)
    tokens = lax.broadcasted_iota(jnp.int32, (L,), 0)
    queries = [pltriton.load(q.at[at, own, columns]) for columns in slices(widths)]

    def keys(i: jax.Array) -> tuple[Parts, Parts]:
        token = i * L + tokens
        some = token < length
        page = pltriton.load(pages.at[at, token // page_size], mask=some, other=0)
        return read(inputs, lax.div(block, per_group), page, lax.rem(token, page_size), some)

    end = jnp.minimum(end, lax.div(length + L - 1, L))
    accs, item_lse = online_softmax(queries, keys, limit_M, begin, end, tokens, value_widths)

    def store(to: Any, to_lse: Any, place: jax.Array) -> None:
        for columns, acc in zip(slices(value_widths), accs, strict=True):
            pltriton.store(to.at[place, own, columns], acc)
        pltriton.store(to_lse.at[place, own], item_lse)

    if parts:
        pl.when((tile >= 0) & (alone == 1))(lambda: store(out, lse, at))
        pl.when((tile >= 0) & (alone == 0))(lambda: store(parts[0], parts[1], item))
    else:
        store(out, lse, at)


def slices(widths: tuple[int, ...]) -> list[Any]:
    """Columns of each of several parts that lie side by side."""
    return [pl.ds(sum(widths[:i]), width) for i, width in enumerate(widths)]


def online_softmax(
    queries: list[jax.Array],
    keys: Callable[[jax.Array], tuple[Parts, Parts]],
    limit_M: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    tokens: jax.Array,
    value_widths: tuple[int, ...],
) -> tuple[list[jax.Array], jax.Array]:
    """Lines of scaled queries, in parts, over the blocks [begin, end) of i32[L] tokens: f32[M, width] and f32[M].

    `keys(i)` gives block i's keys in the same parts, and its values; a line sees the tokens below its `limit_M`.
    """
    (M,), (L,) = limit_M.shape, tokens.shape

    def block(i: jax.Array, carry: Any) -> Any:
        top, total, accs = carry
        k_parts, v_parts = keys(i)
        scored = (scaled(pltriton.dot(q, k.rows_LC.T), k.scale_L) for q, k in zip(queries, k_parts, strict=True))
        logits = functools.reduce(operator.add, scored)
        logits = jnp.where((i * L + tokens)[None] < limit_M[:, None], logits * LOG2E, -jnp.inf)
        new_top = jnp.maximum(top, logits.max(1))
        p = jnp.exp2(logits - new_top[:, None])
        scale = jnp.exp2(top - new_top)
        accs = [
            acc * scale[:, None] + pltriton.dot(scaled(p, v.scale_L).astype(v.rows_LC.dtype), v.rows_LC)
            for acc, v in zip(accs, v_parts, strict=True)
        ]
        return new_top, total * scale + p.sum(1), accs

    zero = jnp.zeros((M,), jnp.float32)
    start = (jnp.full_like(zero, FLOOR), zero, [jnp.zeros((M, width), jnp.float32) for width in value_widths])
    top, total, accs = lax.fori_loop(begin, end, block, start)
    some = total != 0  # a NaN is no empty line: it stays a NaN, so that damage shows
    safe = jnp.where(some, total, 1.0)
    lse = jnp.where(some, top / LOG2E + jnp.log(safe), -jnp.inf)
    return [acc * (1.0 / safe)[:, None] for acc in accs], lse
