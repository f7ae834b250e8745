"""The exact k largest of every row, by narrowing a threshold: no sort, no atomics, the same answer every time.

Floats, seen as integers that keep their order, are split in four at a time: three thresholds are compared with the
whole row, and the quarter is kept that the k-th largest lies in. It ends as soon as exactly k are at or above a
threshold, after 16 passes at most (the k-th largest is then known to the bit, and equal ones are taken by position). A
last pass writes positions down in order, each at its rank.

A long row is cut into chunks that fit in an SM's cache; the k best of each chunk then compete in a second launch. That
changes nothing, for one of the row's k best is one of its chunk's, and chunks keep their order.
"""

import functools
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.launch import triton_call

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
MINUS_INF = -0x7F800001  # the image of -inf: below it are NaNs
MAX_BLOCK = 16384  # two ranks of a block share an int32


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SelectConfig:
    """One point of the tuning space."""

    block: int  # elements that a program looks at at once
    chunk: int  # the longest row that one program takes
    warps: int


def top_k(logits: jax.Array, lengths: jax.Array, *, k: int, config: SelectConfig, interpret: bool = False) -> jax.Array:
    """See `api.top_k`. Refuses blocks that are no power of two or larger than MAX_BLOCK."""
    if config.block & (config.block - 1) or not 0 < config.block <= MAX_BLOCK:
        raise NotImplementedError(f"a block is a power of two of at most {MAX_BLOCK} elements, not {config.block}.")
    R, N = logits.shape
    if not N:
        return jnp.full((R, k), -1, jnp.int32)
    chunk = max(config.chunk, 2 * k)
    run = functools.partial(_select, k=k, block=config.block, warps=config.warps, interpret=interpret)
    if chunk >= N:
        return run(logits, None, lengths, lengths, chunk=N)[0]
    positions, values = run(logits, None, lengths, lengths, chunk=chunk, keep=True)
    slots = -(-lengths // chunk) * k  # of chunks that hold something
    return run(values, positions, slots, lengths, chunk=values.shape[1])[0]


def _select(
    values: jax.Array,
    positions: jax.Array | None,
    sizes: jax.Array,
    present: jax.Array,
    *,
    k: int,
    block: int,
    chunk: int,
    warps: int,
    interpret: bool,
    keep: bool = False,
) -> list[jax.Array]:
    """The k best of every chunk of f32[R, N], i32[R, chunks * k], and with `keep` their values.

    Args:
      positions: i32[R, N] to answer with; None answers with columns.
      sizes: i32[R]: columns of each row. NaN among them is nothing.
      present: i32[R]: elements of each row; no fewer than are among `sizes` columns.
    """
    R, N = values.shape
    chunks = -(-N // chunk)
    shape = (R, chunks * k)
    kernel = functools.partial(_select_kernel, k=k, block=block, chunk=chunk, given=positions is not None)
    return triton_call(
        kernel,
        grid=(chunks, R),
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)[: 1 + keep]],
        warps=warps,
        stages=2,
        interpret=interpret,
        name="indexer_topk_merge" if positions is not None else "indexer_topk_select",
    )(sizes, present, values, *(() if positions is None else (positions,)))


def _select_kernel(
    sizes: Any, present: Any, values: Any, *refs: Any, k: int, block: int, chunk: int, given: bool
) -> None:
    (positions, *outs) = refs if given else (None, *refs)
    nth, row = pl.program_id(0), pl.program_id(1)
    begin, places = nth * chunk, lax.broadcasted_iota(jnp.int32, (block,), 0)
    size = jnp.clip(sizes[row] - begin, 0, chunk)
    there = jnp.clip(present[row] - begin, 0, chunk)
    target, blocks = jnp.minimum(there, k), pl.cdiv(size, block)

    def column(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = i * block + places
        return begin + own, own < size

    def load(i: jax.Array) -> jax.Array:
        """NaN where nothing is: no comparison finds it."""
        at, mine = column(i)
        return pltriton.load(values.at[row, at], mask=mine, other=jnp.float32(jnp.nan))

    low, high, above = _threshold(load, blocks, block, target, there)
    ties_wanted = target - above

    def write(i: jax.Array, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sure_before, ties_before = before
        x, (at, mine) = load(i), column(i)
        sure = (x >= high).astype(jnp.int32)
        tie = (x >= low).astype(jnp.int32) - sure
        ranks = lax.cumsum(sure + (tie << 16), 0)
        tie_rank = ties_before + (ranks >> 16) - tie
        taken = (sure == 1) | ((tie == 1) & (tie_rank < ties_wanted))
        rank = sure_before + (ranks & 0xFFFF) - sure + jnp.minimum(tie_rank, ties_wanted)
        answer = at if positions is None else pltriton.load(positions.at[row, at], mask=mine, other=-1)
        for out, what in zip(outs, (answer, x), strict=False):
            pltriton.store(out.at[row, nth * k + rank], what, mask=taken)
        return sure_before + sure.sum(0), ties_before + tie.sum(0)

    sure, ties = lax.fori_loop(0, blocks, write, (jnp.int32(0), jnp.int32(0)))
    filled = sure + jnp.minimum(ties, ties_wanted)

    def fill(i: jax.Array, carry: jax.Array) -> jax.Array:
        rank = i * block + places
        for out, what in zip(outs, (jnp.int32(-1), jnp.float32(jnp.nan)), strict=False):
            at = out.at[row, nth * k + rank]
            pltriton.store(at, jnp.full((block,), what), mask=(rank >= filled) & (rank < k))
        return carry

    # A chunk behind the row's end is never read: it stays as it is.
    needed = ((nth == 0) | (size > 0)).astype(jnp.int32) * pl.cdiv(k, block)
    lax.fori_loop(filled // block, needed, fill, jnp.int32(0))


def _threshold(
    load: Any, blocks: jax.Array, block: int, target: jax.Array, there: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(low, high, how many are at or above high): the `target` largest are those, and the first of the ones between."""

    def narrow(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        shift, low, high, at_low, at_high = state
        cuts = [low + (jnp.int32(j) << shift) for j in (1, 2, 3)]
        floats = [_float_of(cut) for cut in cuts]

        def count(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            x = load(i)
            return tuple(s + (x >= f).astype(jnp.int32) for s, f in zip(sums, floats, strict=True))

        zero = jnp.zeros((block,), jnp.int32)
        counts = [s.sum(0) for s in lax.fori_loop(0, blocks, count, (zero, zero, zero))]
        for cut, found in zip(cuts, counts, strict=True):  # rising cuts, falling counts
            enough = found >= target
            low, at_low = jnp.where(enough, cut, low), jnp.where(enough, found, at_low)
        for cut, found in zip(cuts[::-1], counts[::-1], strict=True):
            short = found < target
            high, at_high = jnp.where(short, cut, high), jnp.where(short, found, at_high)
        return shift - 2, low, high, at_low, at_high

    def undecided(state: tuple[jax.Array, ...]) -> jax.Array:
        return (state[0] >= 0) & (state[3] > target)

    start = (jnp.int32(30), jnp.int32(INT_MIN), jnp.int32(INT_MAX), there, jnp.int32(0))
    _, low, high, _, above = lax.while_loop(undecided, narrow, start)
    return _float_of(low), _float_of(high), above


def _float_of(image: jax.Array) -> jax.Array:
    """The float32 that stands at this place among all of them: -inf for what is below it, NaN above inf."""
    image = jnp.maximum(image, MINUS_INF)
    return lax.bitcast_convert_type(image ^ ((image >> 31) & INT_MAX), jnp.float32)
