"""What a program of the Hopper kernel runs: one warpgroup brings rows, one leads, one follows.

See `hopper` for why they are cut so. A barrier is named for what has happened when it is passed.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.mosaic import (
    COLUMNS,
    TOKENS,
    add_product,
    in_turn,
    laid,
    load,
    masked_logits,
    over,
    runs,
    zero_rows,
)

LOG2E = math.log2(math.e)
HEADS = 64  # of a block: the rows of a wgmma
HALVES = 2  # of the latent's columns in shared memory, one a computing warpgroup
LEADER, FOLLOWER, BRINGER = range(3)
# Of a thread of each. A program starts with 168 for each of its 384 threads, so these may add up to 3 x 168: a
# warpgroup that asks for more than the others gave back would wait for ever.
REGISTERS = {LEADER: 208, FOLLOWER: 160, BRINGER: 136}


def attend(
    turns: Any, items: Any, pages: Any, held: Any, q: Any, *refs: Any, bring: Callable[..., None], interpreted: bool,
    **scratch: Any,
) -> None:  # fmt: skip
    """One program of `hopper._items`, which says what `scratch` is: HEADS heads of a worker's items.

    Args:
      bring: `bring(pages, pools, row, begin, end, length, nth0, **scratch)` fills the stages with an item's blocks.
    """
    *pools, out, out_lse, part, part_lse = refs
    wg = lax.axis_index("wg")
    heads = pl.ds(lax.axis_index("heads") * HEADS, HEADS)
    each = functools.partial(in_turn, turns, items, held, lax.axis_index("worker"))

    @pl.when(wg == BRINGER)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS[BRINGER], action="decrease")

        @each
        def _item(_: Any, row: Any, begin: Any, end: Any, length: Any, nth0: Any) -> None:
            pl.when(end > begin)(lambda: _queries(q.at[row, heads], nth0 > 0, **scratch))
            bring(pages, pools, row, begin, end, length, nth0, **scratch)

    def store(which: int, item: Any, acc: jax.Array, lse: Any = None) -> None:
        columns = pl.ds(which * acc.shape[1], acc.shape[1])

        def to(o: Any, o_lse: Any, place: jax.Array) -> None:
            o[place, heads, columns] = acc
            if lse is not None:
                plgpu.copy_smem_to_gmem(lse, o_lse.at[place, heads])
                plgpu.wait_smem_to_gmem(0)

        alone = items[item, 3] == 1  # read late: there is no register to keep them in
        pl.when(alone)(lambda: to(out, out_lse, items[item, 0]))
        pl.when(~alone)(lambda: to(part, part_lse, item))

    @pl.when(wg == LEADER)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS[LEADER], action="increase")

        @each
        def _item(item: Any, _: Any, begin: Any, end: Any, length: Any, nth0: Any) -> None:
            acc = _lead(begin, end, length, nth0, interpreted, **scratch)
            store(LEADER, item, acc, scratch["factor"])

    @pl.when(wg == FOLLOWER)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS[FOLLOWER], action="decrease")

        @each
        def _item(item: Any, _: Any, begin: Any, end: Any, __: Any, nth0: Any) -> None:
            store(FOLLOWER, item, _follow(begin, end, nth0, interpreted, **scratch))


def _queries(q: Any, again: jax.Array, *, q_latent: Any, q_rope: Any, q_here: Any, q_done: Any, **_: Any) -> None:
    """Those of an item, when the item before is done with its own."""
    pl.when(again)(lambda: plgpu.barrier_wait(q_done))
    half, rotary = q_latent.shape[2], q_rope.shape[2]
    for i in range(HALVES):
        plgpu.copy_gmem_to_smem(q.at[:, pl.ds(i * half, half)], q_latent.at[i], q_here)
    plgpu.copy_gmem_to_smem(q.at[:, pl.ds(HALVES * half, rotary)], q_rope.at[0], q_here)


def _lead(
    begin: jax.Array, end: jax.Array, length: jax.Array, nth0: jax.Array, interpreted: bool, *, q_latent: Any,
    q_rope: Any, q_here: Any, q_done: Any, latent: Any, rope: Any, here: Any, done: Any, p_smem: Any, factor: Any,
    p_here: Any, p_done: Any, **_: Any,
) -> jax.Array:  # fmt: skip
    """Logits and probabilities of an item, and its half of the output; leaves the log-sum-exp, base e, in `factor`."""

    def tell(scale: jax.Array, p: jax.Array | None, not_first: jax.Array) -> None:
        pl.when(not_first)(lambda: plgpu.barrier_wait(p_done))
        factor[...] = scale
        if p is not None:
            p_smem[...] = p
        plgpu.commit_smem()
        plgpu.barrier_arrive(p_here)

    def block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, top, total = carry
        slot = lax.rem(nth0 + i - begin, latent.shape[0])
        plgpu.barrier_wait(here.at[slot])
        # Nothing, of which the compiler does not know it: the addresses of the queries are made for every block. Made
        # before the loops, all 36 stayed in registers.
        nothing = i >> 31
        mine = [q_latent.at[j + nothing] for j in range(HALVES)] + [q_rope.at[nothing]]
        keys = [latent.at[slot, j] for j in range(HALVES)] + [rope.at[slot]]
        logits = masked_logits(mine, keys, length - i * TOKENS, interpreted) * LOG2E
        pl.when(i == end - 1)(lambda: plgpu.barrier_arrive(q_done))
        new_top = jnp.maximum(top, logits.max(axis=1))
        scale = jnp.exp2(top - new_top)
        p = jnp.exp2(logits - over(new_top, shape=logits.shape))
        total = total * scale + p.sum(axis=1)
        p16 = p.astype(p_smem.dtype)
        tell(scale, p16, i > begin)
        acc = acc * over(scale, shape=acc.shape)
        acc = add_product(acc, p16, _own(latent, slot), interpreted)
        plgpu.barrier_arrive(done.at[slot])
        return acc, new_top, total

    pl.when(end > begin)(lambda: plgpu.barrier_wait(q_here))
    top = laid(jnp.full((HEADS,), -1e30, jnp.float32), plgpu.Layout.WGMMA.reduce(1), interpreted)
    total = laid(jnp.zeros((HEADS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1), interpreted)
    acc, top, total = lax.fori_loop(begin, end, block, (_zeros(latent, interpreted), top, total))
    some = total != 0
    safe = jnp.where(some, total, jnp.ones_like(total))
    tell(1.0 / safe, None, end > begin)
    acc = acc * over(1.0 / safe, shape=acc.shape)
    lse = jnp.where(some, top / LOG2E + jnp.log(safe), jnp.full_like(top, -jnp.inf))
    plgpu.barrier_wait(p_done)  # the follower has its factor: the place is free for the log-sum-exp
    factor[...] = lse
    plgpu.commit_smem()
    return acc


def _follow(
    begin: jax.Array, end: jax.Array, nth0: jax.Array, interpreted: bool, *, latent: Any, here: Any, done: Any,
    p_smem: Any, factor: Any, p_here: Any, p_done: Any, **_: Any,
) -> jax.Array:  # fmt: skip
    """The other half of an item's output, of what the leader tells."""

    def told(acc: jax.Array) -> jax.Array:
        plgpu.barrier_wait(p_here)
        scale = load(factor, plgpu.Layout.WGMMA.reduce(1))
        return acc * over(scale, shape=acc.shape)

    def block(i: jax.Array, acc: jax.Array) -> jax.Array:
        slot = lax.rem(nth0 + i - begin, latent.shape[0])
        plgpu.barrier_wait(here.at[slot])
        acc = add_product(told(acc), p_smem, _own(latent, slot), interpreted)
        plgpu.barrier_arrive(p_done)
        plgpu.barrier_arrive(done.at[slot])
        return acc

    acc = told(lax.fori_loop(begin, end, block, _zeros(latent, interpreted)))
    plgpu.barrier_arrive(p_done)
    return acc


def _own(latent: Any, slot: jax.Array) -> Any:
    """The warpgroup's half of a stage. By its number: JAX 0.12 compiles no `run_state` over a constant index."""
    return latent.at[slot, lax.axis_index("wg")]


def _zeros(latent: Any, interpreted: bool) -> jax.Array:
    return laid(jnp.zeros((HEADS, latent.shape[3]), jnp.float32), plgpu.Layout.WGMMA, interpreted)


def copy_rows(
    pages: Any, pools: Any, row: jax.Array, begin: jax.Array, end: jax.Array, length: jax.Array, nth0: jax.Array,
    *, interpreted: bool, latent: Any, rope: Any, here: Any, landed: Any, done: Any, **_: Any,
) -> None:  # fmt: skip
    """`bring` of BF16 rows: by TMA, a block as soon as its stage is free; zeros where a block's tokens end."""
    (pool,) = pools
    page_size, stages, half, rotary = pool.shape[1], latent.shape[0], latent.shape[3], rope.shape[2]
    copies = (HALVES + 1) * max(1, TOKENS // page_size)

    @pl.loop(begin, end)
    def _block(block: jax.Array) -> None:
        nth = nth0 + block - begin
        slot = lax.rem(nth, stages)
        pl.when(nth >= stages)(lambda: plgpu.barrier_wait(done.at[slot]))

        def copy(barrier: Any) -> None:
            for page, slots, tokens in runs(pages, row, length, block, page_size):
                for i in range(HALVES):
                    mine = pool.at[page, slots, pl.ds(i * half, half)]
                    plgpu.copy_gmem_to_smem(mine, latent.at[slot, i, tokens], barrier)
                mine = pool.at[page, slots, pl.ds(HALVES * half, rotary)]
                plgpu.copy_gmem_to_smem(mine, rope.at[slot, tokens], barrier)

        whole = block * TOKENS + TOKENS <= length
        pl.when(whole)(lambda: copy(here.at[slot]))

        @pl.when(~whole)
        def _() -> None:
            copy(landed)
            plgpu.barrier_wait(landed)
            for i in range(HALVES):
                zero_rows(latent.at[slot, i], length - block * TOKENS, COLUMNS, interpreted)
            plgpu.commit_smem()
            for _ in range(copies):  # as often as they would have arrived
                plgpu.barrier_arrive(here.at[slot])
