"""Split-KV decode for every GPU the Triton backend compiles for: wgmma on Hopper, tcgen05 on Blackwell, mma elsewhere.

One program takes one item of `split_work` and one block of heads: it gathers its tokens' rows by address (so any page
size will do), and keeps the next blocks in flight while it computes. Items of one row are merged by a second kernel.
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.formats import GROUP, fp8_views, is_fp8
from pallas_kernels.launch import refuse_sizes, refuse_stored, triton_call
from pallas_kernels.mla_decode.work import Cut, Work, split_work

LOG2E = math.log2(math.e)

Found = tuple[jax.Array, jax.Array, jax.Array]  # page, slot, and whether the token counts


class Part(NamedTuple):
    """Some columns of a block of keys or values. Scales are applied to logits and probabilities, which are fewer."""

    rows_LC: jax.Array
    scale_L: jax.Array | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TritonConfig:
    """One point of the tuning space."""

    block_heads: int
    block_tokens: int
    warps: int
    stages: int  # blocks of tokens in flight
    workers: int  # programs of one head block that the chip holds at once
    overhead: int = 2  # what an item costs beside its blocks, in blocks

    @property
    def cut(self) -> Cut:
        """Of the work that it takes."""
        return Cut(self.block_tokens, self.workers, persistent=False)

    def plan(self, held: Any) -> Work:
        """The items for i32[B] tokens held: the same for every layer of a step, so worth making once."""
        return split_work(held, block=self.block_tokens, workers=self.workers, overhead=self.overhead)


def decode(
    q: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    held: jax.Array,
    *,
    value_width: int,
    config: TritonConfig,
    work: Work | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.mla_decode`. Refuses as `views` does."""
    pools = views(q, pool, value_width=value_width, config=config, interpret=interpret)
    work = config.plan(held) if work is None else work
    find = functools.partial(_by_page, page_size=pool.shape[1])
    static = {"value_width": value_width, "config": config, "interpret": interpret, "name": "mla_decode"}
    return attend(q, pools, held, pages, find, work, **static)


def _by_page(pages: Any, row: jax.Array, token: jax.Array, mine: jax.Array, *, page_size: int) -> Found:
    page = pltriton.load(pages.at[row, token // page_size], mask=mine, other=0)
    return page, token % page_size, mine


def views(
    q: jax.Array, pool: jax.Array, *, value_width: int, config: TritonConfig, interpret: bool
) -> tuple[jax.Array, ...]:
    """The pool as the kernel reads it: itself, or the three views of FP8 rows.

    Refuses widths and blocks as `refuse_sizes` does, and rows as `refuse_stored`.
    """
    refuse_sizes({
        "latent width": value_width, "rotary width": q.shape[-1] - value_width,
        "block of heads": config.block_heads, "block of tokens": config.block_tokens,
    })  # fmt: skip
    refuse_stored("rows", pool.dtype, interpret=interpret)
    return tuple(fp8_views(pool)) if is_fp8(pool) else (pool,)


def attend(
    q: jax.Array,
    pools: tuple[jax.Array, ...],
    held: jax.Array,
    table: jax.Array,
    find: Callable[[Any, jax.Array, jax.Array, jax.Array], Found],
    work: Work,
    *,
    value_width: int,
    config: TritonConfig,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q[B, H, D] over the first `held` tokens of each row, wherever `find` says that they lie.

    Args:
      pools: as `views` gives them.
      find: `find(table, row, token, mine)` is called in the kernel with i32[L] tokens and which of them the row has; it
        answers with their pages, slots, and which of them count.
      work: over `held`. Where it has one item for every row, no parts are kept and nothing is merged.

    Returns as `api.mla_decode` does.
    """
    (B, H, D), N = q.shape, work.items.shape[0]
    cast = pools[0].dtype if len(pools) == 1 else jnp.bfloat16
    heads = -(-H // config.block_heads) * config.block_heads
    q = jnp.pad(q.astype(cast), ((0, 0), (0, heads - H), (0, 0)))
    parts = N if N > B else 1
    kernel = functools.partial(_item_kernel, find=find, value_width=value_width, rotary=D - value_width, config=config)
    shapes = [(B, heads, value_width), (B, heads), (parts, heads, value_width), (parts, heads)]
    out, lse, *rest = triton_call(
        kernel,
        grid=(heads // config.block_heads, N),  # an item's head blocks run side by side and share its rows in L2
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
        name=f"{name}_items",
    )(work.items, table, held, q, *pools)
    if N > B:
        out, lse = merge(work, [out, lse, *rest], interpret, name)
    return out[:, :H], lse[:, :H]


def _item_kernel(
    items: Any, table: Any, held: Any, q: Any, *refs: Any, find: Any, value_width: int, rotary: int, config: Any
) -> None:
    *pools, out, lse, part, part_lse = refs
    N, L = config.block_heads, config.block_tokens
    item, heads = pl.program_id(1), pl.ds(pl.program_id(0) * N, N)
    row, begin, end, alone = (items[item, i] for i in range(4))
    at = jnp.maximum(row, 0)
    length = held[at]
    tokens = lax.broadcasted_iota(jnp.int32, (L,), 0)
    fp8 = len(pools) == 3
    read, widths = (_fp8_rows, (GROUP,) * (value_width // GROUP)) if fp8 else (_plain_rows, (value_width,))
    parts = [pl.ds(sum(widths[:i]), width) for i, width in enumerate((*widths, rotary))]
    queries = [pltriton.load(q.at[at, heads, columns]) for columns in parts]

    def block(i: jax.Array, carry: Any) -> Any:
        top, total, accs = carry
        token = i * L + tokens
        page, slot, mine = find(table, at, token, token < length)
        rows = read(pools, page, slot, mine, value_width, rotary)
        scored = (scaled(pltriton.dot(q_NC, k.rows_LC.T), k.scale_L) for q_NC, k in zip(queries, rows, strict=True))
        logits = functools.reduce(operator.add, scored)
        logits = jnp.where(mine[None], logits * LOG2E, -jnp.inf)
        new_top = jnp.maximum(top, logits.max(1))
        p = jnp.exp2(logits - new_top[:, None])
        scale = jnp.exp2(top - new_top)
        accs = [
            acc * scale[:, None] + pltriton.dot(scaled(p, k.scale_L).astype(k.rows_LC.dtype), k.rows_LC)
            for acc, k in zip(accs, rows, strict=False)
        ]
        return new_top, total * scale + p.sum(1), accs

    # Of an item without a token the floor stays the maximum: its total is 0, and a weight below the floor is too.
    zero = jnp.zeros((N,), jnp.float32)
    start = (jnp.full_like(zero, -1e30), zero, [jnp.zeros((N, width), jnp.float32) for width in widths])
    top, total, accs = lax.fori_loop(begin, end, block, start)
    some = total != 0  # a NaN is no empty row: it stays a NaN, so that damage shows
    safe = jnp.where(some, total, 1.0)
    item_lse = jnp.where(some, top / LOG2E + jnp.log(safe), -jnp.inf)

    def store(to: Any, to_lse: Any, place: jax.Array) -> None:
        for columns, acc in zip(parts, accs, strict=False):
            pltriton.store(to.at[place, heads, columns], acc * (1.0 / safe)[:, None])
        pltriton.store(to_lse.at[place, heads], item_lse)

    pl.when((row >= 0) & (alone == 1))(lambda: store(out, lse, at))
    pl.when((row >= 0) & (alone == 0))(lambda: store(part, part_lse, item))


def scaled(x_ML: jax.Array, scale_L: jax.Array | None) -> jax.Array:
    """Columns times their scales, if they have any."""
    return x_ML if scale_L is None else x_ML * scale_L[None]


def load_rows(pool: Any, page: jax.Array, slot: jax.Array, mask: jax.Array, first: int, width: int) -> jax.Array:
    """Columns [first, first + width) of the token at each (page, slot); zeros where not `mask`, whatever lies there.

    Every index is an array: that is what interpret mode reads, and Triton still sees that columns are contiguous.
    """
    shape = (page.shape[0], width)
    column = first + lax.broadcasted_iota(jnp.int32, shape, 1)
    at = pool.at[lax.broadcast_in_dim(page, shape, (0,)), lax.broadcast_in_dim(slot, shape, (0,)), column]
    return pltriton.load(at, mask=lax.broadcast_in_dim(mask, shape, (0,)), other=jnp.zeros((), pool.dtype))


def _plain_rows(
    pools: list[Any], page: jax.Array, slot: jax.Array, mask: jax.Array, latent: int, rotary: int
) -> list[Part]:
    (pool,) = pools
    return [Part(load_rows(pool, page, slot, mask, first, width)) for first, width in ((0, latent), (latent, rotary))]


def _fp8_rows(
    pools: list[Any], page: jax.Array, slot: jax.Array, mask: jax.Array, latent: int, rotary: int
) -> list[Part]:
    """Every group of columns as it is, which BF16 holds exactly, beside its scale."""
    values, scales, rope = pools
    groups = latent // GROUP
    parts = []
    for group in range(groups):
        scale_L = load_rows(scales, page, slot, mask, latent // 4 + group, 1).reshape(-1)
        parts.append(Part(load_rows(values, page, slot, mask, group * GROUP, GROUP).astype(jnp.bfloat16), scale_L))
    return [*parts, Part(load_rows(rope, page, slot, mask, (latent + 4 * groups) // 2, rotary))]


def merge(work: Work, items: list[jax.Array], interpret: bool, name: str) -> tuple[jax.Array, jax.Array]:
    """Put the union of the parts of every row that has several in its place."""
    out, lse, part, part_lse = items
    B, H, V = out.shape
    most = 1 << (part.shape[0] - 1).bit_length()
    merged = triton_call(
        functools.partial(_merge_kernel, most=most, value_width=V),
        grid=(H, B),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, lse)],
        aliases={3: 0, 4: 1},
        warps=4,
        stages=4,
        interpret=interpret,
        name=f"{name}_merge",
    )(work.first, part, part_lse, out, lse)
    return merged[0], merged[1]


def _merge_kernel(
    first: Any, part: Any, part_lse: Any, _out: Any, _lse: Any, out: Any, lse: Any, *, most: int, value_width: int
) -> None:
    head, row = pl.program_id(0), pl.program_id(1)
    begin, end = first[row], first[row + 1]

    @pl.when(end - begin > 1)
    def _() -> None:
        places = lax.broadcasted_iota(jnp.int32, (most,), 0)
        mine = places < end - begin
        lses = pltriton.load(part_lse.at[jnp.where(mine, begin + places, begin), head], mask=mine, other=-jnp.inf)
        highest = lses.max(0)
        top = jnp.where(highest == -jnp.inf, 0.0, highest)  # no part saw anything: zeros of log-sum-exp -inf, not NaN
        total = jnp.exp(lses - top).sum(0)
        safe = jnp.where(total != 0, total, 1.0)

        def add(i: jax.Array, acc: jax.Array) -> jax.Array:
            weight = jnp.exp(part_lse[i, head] - top)
            return acc + weight * pltriton.load(part.at[i, head, pl.ds(0, value_width)])

        acc = lax.fori_loop(begin, end, add, jnp.zeros((value_width,), jnp.float32))
        pltriton.store(out.at[row, head, pl.ds(0, value_width)], acc / safe)
        lse[row, head] = jnp.where(total != 0, top + jnp.log(safe), -jnp.inf)
