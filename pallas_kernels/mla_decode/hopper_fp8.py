"""Split-KV decode of FP8 rows in Mosaic GPU for sm_90a: one warpgroup makes BF16 of the rows, one leads, one follows.

wgmma takes BF16 from shared memory, so a warpgroup loads a block of 64 tokens from device memory into registers, puts
each value and its scale together in float32, rounds once, and stores it swizzled: of raw rows nothing is kept in shared
memory, which two blocks of BF16 and the queries of 64 heads fill. The two that compute share the logits. The leader
makes them, hands probabilities and the accumulator's factor over through shared memory, and keeps half of the latent
columns; the follower keeps the other half and is at most one block behind, so that its products run beside the leader's
softmax and next logits.
"""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.formats import GROUP, Fp8Views, fp8_views
from pallas_kernels.mla_decode.fp8_rows import COLUMNS, TOKENS, Converter, Part
from pallas_kernels.mla_decode.mosaic import add_product, interpret_params, laid, load, masked_logits, over, zero_rows
from pallas_kernels.mla_decode.work import Work

LOG2E = math.log2(math.e)
HEADS = 64  # of a block
HALVES = 2  # of the latent columns in shared memory
LEADER, FOLLOWER, CONVERTER = 0, 1, 2
# Of a thread of each. A program starts with 168 for each of its 384 threads, so these may add up to 3 x 168: a
# warpgroup that asks for more than the others gave back would wait for ever.
REGISTERS = {LEADER: 216, FOLLOWER: 160, CONVERTER: 128}


def items(
    work: Work,
    pages: jax.Array,
    held: jax.Array,
    q: jax.Array,
    pool: jax.Array,
    *,
    value_width: int,
    stages: int,
    interpret: bool,
) -> list[jax.Array]:
    """As `triton._items`, for u8 pools and queries padded to whole blocks of heads."""
    rows, heads, columns = q.shape
    item_count = work.items.shape[0]
    half, rotary = value_width // HALVES, columns - value_width
    tiled: Any = {"transforms": (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(128))}
    shapes = [(rows, heads, value_width), (rows, heads), (item_count, heads, value_width), (item_count, heads)]
    kernel = plgpu.kernel(
        functools.partial(
            _kernel, page_size=pool.shape[1], value_width=value_width, stages=stages, interpreted=interpret
        ),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid=(item_count, heads // HEADS),  # the last axis runs first: head blocks of an item share its rows in L2
        grid_names=("item", "heads"),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((HALVES, HEADS, half), jnp.bfloat16, **tiled),
            plgpu.SMEM((HEADS, rotary), jnp.bfloat16, **tiled),
            plgpu.SMEM((stages, HALVES, TOKENS, half), jnp.bfloat16, **tiled),
            plgpu.SMEM((stages, TOKENS, rotary), jnp.bfloat16, **tiled),
            plgpu.SMEM((HEADS, TOKENS), jnp.bfloat16, **tiled),
            plgpu.SMEM((HEADS,), jnp.float32),
            plgpu.Barrier(num_arrivals=HALVES + 1),  # queries are here
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),  # a block is here
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # a block is done with
            plgpu.Barrier(num_arrivals=1),  # probabilities are here
            plgpu.Barrier(num_arrivals=1),  # probabilities are done with
        ],
        # Sums and maxima stay within four lanes, and so need no scratch. The kernel orders a warpgroup's threads by
        # itself: between a store to shared memory and whatever reads it lies a `commit_smem`, which they all wait at.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret_params(interpret),
        kernel_name="mla_decode_hopper_fp8",
    )
    return list(kernel(work.items, pages, held, q, *fp8_views(pool)))


def _parts(latent: Any, rope: Any, here: Any, done: Any, interpreted: bool) -> list[Part]:
    """Of a row, for a stage: the first waits until it is free, the last tells that it is full."""
    stages, half = latent.shape[0], latent.shape[3]

    def slot(nth: Any) -> Any:
        return lax.rem(nth, stages)

    def to(group: int) -> Any:
        which, inside = divmod(group * GROUP, half)

        def put(nth: Any, tokens: Any, column: int, numbers: jax.Array) -> None:
            latent[slot(nth), which, tokens, pl.ds(inside + column, GROUP)] = numbers

        return put

    def put_rope(nth: Any, tokens: Any, column: int, numbers: jax.Array) -> None:
        rope[slot(nth), tokens, pl.ds(column, COLUMNS)] = numbers

    def before(nth: Any) -> None:
        pl.when(nth >= stages)(lambda: plgpu.barrier_wait(done.at[slot(nth)]))

    def after(nth: Any, left: Any) -> None:
        @pl.when(left < TOKENS)
        def _() -> None:
            plgpu.commit_smem()  # what other threads stored is read here
            for which in range(HALVES):
                zero_rows(latent.at[slot(nth), which], left, COLUMNS, interpreted)

        plgpu.commit_smem()
        plgpu.barrier_arrive(here.at[slot(nth)])

    first, *others = (Part(group=g, width=GROUP, put=to(g)) for g in range(HALVES * half // GROUP))
    rotary = Part(group=None, width=COLUMNS, put=put_rope, after=after)
    return [replace(first, before=before), *others, rotary]


def _kernel(
    work: Any, pages: Any, held: Any, q: Any, values: Any, scales: Any, rotary: Any,
    out: Any, out_lse: Any, part: Any, part_lse: Any,
    q_latent: Any, q_rope: Any, latent: Any, rope: Any, p_smem: Any, factor: Any,
    q_here: Any, here: Any, done: Any, p_here: Any, p_done: Any,
    *, page_size: int, value_width: int, stages: int, interpreted: bool,
) -> None:  # fmt: skip
    item, wg = lax.axis_index("item"), lax.axis_index("wg")
    heads = pl.ds(lax.axis_index("heads") * HEADS, HEADS)
    half = value_width // HALVES

    def given() -> tuple[jax.Array, ...]:
        """Row, first block, last + 1 and tokens: read by each warpgroup, since none has a register to keep more in."""
        at = jnp.maximum(work[item, 0], 0)
        return at, work[item, 1], work[item, 2], held[at]

    @pl.when(wg == CONVERTER)
    def _convert() -> None:
        plgpu.set_max_registers(REGISTERS[CONVERTER], action="decrease")
        at, begin, end, length = given()

        @pl.when(work[item, 0] >= 0)
        def _() -> None:
            for i in range(HALVES):
                plgpu.copy_gmem_to_smem(q.at[at, heads, pl.ds(i * half, half)], q_latent.at[i], q_here)
            plgpu.copy_gmem_to_smem(q.at[at, heads, pl.ds(value_width, q_rope.shape[1])], q_rope, q_here)

        rows = Converter(
            pool=Fp8Views(values, scales, rotary),
            pages=pages,
            row=at,
            length=length,
            page_size=page_size,
            value_width=value_width,
            rotary=q_rope.shape[1],
            interpreted=interpreted,
        )
        rows.run(begin, end, _parts(latent, rope, here, done, interpreted))

    def zeros() -> jax.Array:
        return laid(jnp.zeros((HEADS, half), jnp.float32), plgpu.Layout.WGMMA, interpreted)

    def store(acc: jax.Array, which: int, lse: jax.Array | None) -> None:
        columns = pl.ds(which * half, half)

        def to(o: Any, o_lse: Any, place: jax.Array) -> None:
            o[place, heads, columns] = acc
            if lse is not None:
                plgpu.copy_smem_to_gmem(factor, o_lse.at[place, heads])
                plgpu.wait_smem_to_gmem(0)

        exists, alone = work[item, 0] >= 0, work[item, 3] == 1  # read late: there is no register to keep them in
        pl.when(exists & alone)(lambda: to(out, out_lse, work[item, 0]))
        pl.when(exists & ~alone)(lambda: to(part, part_lse, item))

    @pl.when(wg == LEADER)
    def _lead() -> None:
        plgpu.set_max_registers(REGISTERS[LEADER], action="increase")
        _, begin, end, length = given()
        pl.when(work[item, 0] >= 0)(lambda: plgpu.barrier_wait(q_here))

        def tell(scale: jax.Array, p: jax.Array | None, not_first: jax.Array) -> None:
            @pl.when(not_first)
            def _() -> None:
                plgpu.barrier_wait(p_done)

            factor[...] = scale
            if p is not None:
                p_smem[...] = p
            plgpu.commit_smem()
            plgpu.barrier_arrive(p_here)

        def block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, top, total = carry
            slot = lax.rem(i - begin, stages)
            plgpu.barrier_wait(here.at[slot])
            mine = [q_latent.at[j] for j in range(HALVES)] + [q_rope]
            keys = [latent.at[slot, j] for j in range(HALVES)] + [rope.at[slot]]
            logits = masked_logits(mine, keys, length - i * TOKENS, interpreted) * LOG2E
            new_top = jnp.maximum(top, logits.max(axis=1))
            scale = jnp.exp2(top - new_top)
            p = jnp.exp2(logits - over(new_top, shape=logits.shape))
            total = total * scale + p.sum(axis=1)
            p16 = p.astype(jnp.bfloat16)
            tell(scale, p16, i > begin)
            acc = acc * over(scale, shape=acc.shape)
            acc = add_product(acc, p16, latent.at[slot, LEADER], interpreted)
            plgpu.barrier_arrive(done.at[slot])
            return acc, new_top, total

        top = laid(jnp.full((HEADS,), -1e30, jnp.float32), plgpu.Layout.WGMMA.reduce(1), interpreted)
        total = laid(jnp.zeros((HEADS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1), interpreted)
        acc, top, total = lax.fori_loop(begin, end, block, (zeros(), top, total))
        some = total != 0
        safe = jnp.where(some, total, jnp.ones_like(total))
        tell(1.0 / safe, None, end > begin)
        acc = acc * over(1.0 / safe, shape=acc.shape)
        lse = jnp.where(some, top / LOG2E + jnp.log(safe), jnp.full_like(top, -jnp.inf))
        plgpu.barrier_wait(p_done)  # the follower has its factor: the place is free for the log-sum-exp
        factor[...] = lse
        plgpu.commit_smem()
        store(acc, LEADER, lse)

    @pl.when(wg == FOLLOWER)
    def _follow() -> None:
        plgpu.set_max_registers(REGISTERS[FOLLOWER], action="decrease")
        _, begin, end, _ = given()

        def told(acc: jax.Array) -> jax.Array:
            plgpu.barrier_wait(p_here)
            scale = load(factor, plgpu.Layout.WGMMA.reduce(1))
            return acc * over(scale, shape=acc.shape)

        def block(i: jax.Array, acc: jax.Array) -> jax.Array:
            slot = lax.rem(i - begin, stages)
            plgpu.barrier_wait(here.at[slot])
            acc = add_product(told(acc), p_smem, latent.at[slot, FOLLOWER], interpreted)
            plgpu.barrier_arrive(p_done)
            plgpu.barrier_arrive(done.at[slot])
            return acc

        acc = told(lax.fori_loop(begin, end, block, zeros()))
        plgpu.barrier_arrive(p_done)
        store(acc, FOLLOWER, None)
