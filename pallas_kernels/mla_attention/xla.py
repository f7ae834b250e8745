"""Online softmax over blocks of pages, for every platform XLA compiles for.

Sequences go in small groups; the loop over blocks runs only as far as the longest history of its group, so one program
serves every context length and a short request does not pay for a long one.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import refuse_fp8
from pallas_kernels.mla_attention.table import PageTable

BLOCK_TOKENS = 128
LONG_BLOCK_TOKENS = 512  # of decode rows, as far as the longest history fills such blocks
GROUP_ROWS = 2048  # query rows (times heads) that share a pass over their keys, so that a block stays in cache
GROUP_SEQUENCES = 8
PRODUCT_SEQUENCES = 4  # per product: XLA:CPU runs one batched product on one core, several at a time on all


def attend(
    q: jax.Array,
    positions: jax.Array,
    pool: jax.Array,
    table: PageTable,
    *,
    decode: int,
    tile: int,
    value_width: int,
    shares: int,
    interleave: int,
) -> tuple[jax.Array, jax.Array]:
    """See `api.mla_attention`."""
    refuse_fp8("xla", pool)
    tiles = table.pages.shape[0] - decode
    outs, lses = [], []
    for seqs, rows, first_seq, first_row in ((decode, 1, 0, 0), (tiles, tile, decode, decode)):
        if seqs == 0:
            continue
        q_SQHD = q[first_row : first_row + seqs * rows].reshape(seqs, rows, *q.shape[1:])
        positions_SQ = positions[first_row : first_row + seqs * rows].reshape(seqs, rows)
        own = jax.tree.map(lambda x, a=first_seq, b=first_seq + seqs: x[a:b], table)
        out, lse = _attend_grouped(q_SQHD, positions_SQ, pool, own, value_width, shares, interleave)
        outs.append(out.reshape(seqs * rows, *out.shape[2:]))
        lses.append(lse.reshape(seqs * rows, -1))
    return jnp.concatenate(outs), jnp.concatenate(lses)


def _attend_grouped(
    q_SQHD: jax.Array,
    positions_SQ: jax.Array,
    pool_PKD: jax.Array,
    table: PageTable,
    value_width: int,
    shares: int,
    interleave: int,
) -> tuple[jax.Array, jax.Array]:
    S, Q, H, _ = q_SQHD.shape
    most = max(1, min(GROUP_SEQUENCES, GROUP_ROWS // (Q * H)))
    size = next(n for n in range(min(most, S), 0, -1) if S % n == 0)

    def group(args: tuple[jax.Array, jax.Array, PageTable]) -> tuple[jax.Array, jax.Array]:
        q, positions, own = args
        return _attend_sequences(q, positions, pool_PKD, own, value_width, shares, interleave)

    if size == S:
        return group((q_SQHD, positions_SQ, table))
    split = jax.tree.map(lambda x: x.reshape(S // size, size, *x.shape[1:]), (q_SQHD, positions_SQ, table))
    return jax.tree.map(lambda x: x.reshape(S, *x.shape[2:]), jax.lax.map(group, split))


def _attend_sequences(
    q_SQHD: jax.Array,
    positions_SQ: jax.Array,
    pool_PKD: jax.Array,
    table: PageTable,
    value_width: int,
    shares: int,
    interleave: int,
) -> tuple[jax.Array, jax.Array]:
    S, Q, H, D = q_SQHD.shape
    page_size = pool_PKD.shape[1]
    q_SND = q_SQHD.reshape(S, Q * H, D)
    zero = jnp.zeros((S, Q * H), jnp.float32)
    carry = (jnp.full_like(zero, -jnp.inf), zero, jnp.zeros((S, Q * H, D), jnp.float32))
    longest, done = table.held.max(), 0
    short = max(1, BLOCK_TOKENS // page_size)
    long = max(short, LONG_BLOCK_TOKENS // page_size // short * short)
    width = -(-table.pages.shape[1] // long) * long
    pages_SW = jnp.pad(table.pages, ((0, 0), (0, width - table.pages.shape[1])))

    def block(pages_per_block: int, start: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Take in the keys of the pages from column `start` of the table."""
        top_SN, total_SN, acc_SND = carry
        L = pages_per_block * page_size
        pages = jax.lax.dynamic_slice_in_dim(pages_SW, start, pages_per_block, 1)
        local = (start * page_size + jnp.arange(L, dtype=jnp.int32))[None]
        at_SL = (local // interleave * shares + table.lag[:, None]) * interleave + local % interleave
        held_SL = local < table.held[:, None]
        # Without the barrier a gather fused into a one-sequence product is wrong on CPU in JAX 0.10.2.
        keys = [
            jax.lax.optimization_barrier(
                jnp.where(held_SL[part, :, None], as_numbers(pool_PKD[pages[part]], q_SQHD.dtype).reshape(-1, L, D), 0)
            )
            for part in parts
        ]
        # Keys first: twice as fast as queries first on CPU, which the barrier keeps XLA from turning round.
        logits_SLN = [
            jax.lax.optimization_barrier(_product(k_SLD, q_SND[part], (2, 2)))
            for k_SLD, part in zip(keys, parts, strict=True)
        ]
        logits_SNL = jnp.concatenate(logits_SLN).swapaxes(1, 2)
        visible_SQL = held_SL[:, None] & (at_SL[:, None] <= positions_SQ[..., None])
        visible_SNL = jnp.broadcast_to(visible_SQL[:, :, None], (S, Q, H, L)).reshape(S, Q * H, L)
        logits_SNL = jnp.where(visible_SNL, logits_SNL, -jnp.inf)
        new_top = jnp.maximum(top_SN, logits_SNL.max(-1))
        safe_top = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
        p_SNL = jnp.exp(logits_SNL - safe_top[..., None])
        scale = jnp.exp(jnp.where(jnp.isfinite(top_SN), top_SN, -jnp.inf) - safe_top)
        total = total_SN * scale + p_SNL.sum(-1)
        sums = [
            jax.lax.optimization_barrier(_product(p_SNL[part].astype(k_SLD.dtype), k_SLD, (2, 1)))
            for k_SLD, part in zip(keys, parts, strict=True)
        ]
        return new_top, total, acc_SND * scale[..., None] + jnp.concatenate(sums)

    parts = [slice(i, i + PRODUCT_SEQUENCES) for i in range(0, S, PRODUCT_SEQUENCES)]
    if Q == 1 and long > short:
        done = longest // (long * page_size)
        carry = jax.lax.fori_loop(0, done, lambda i, carry: block(long, i * long, carry), carry)
        done = done * (long // short)
    blocks = (longest + short * page_size - 1) // (short * page_size)
    top, total, acc = jax.lax.fori_loop(done, blocks, lambda i, carry: block(short, i * short, carry), carry)
    some = total != 0  # a NaN is no empty row: it stays a NaN, so that damage shows
    safe = jnp.where(some, total, 1.0)
    out = (acc / safe[..., None]).reshape(S, Q, H, D)[..., :value_width]
    return out, jnp.where(some, top + jnp.log(safe), -jnp.inf).reshape(S, Q, H)


def as_numbers(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Unsigned words as wide as `dtype` as the numbers whose bits they hold; anything else as it is."""
    words = jnp.issubdtype(x.dtype, jnp.unsignedinteger) and x.dtype.itemsize == jnp.dtype(dtype).itemsize
    return jax.lax.bitcast_convert_type(x, dtype) if words else x


def _product(a: jax.Array, b: jax.Array, over: tuple[int, int]) -> jax.Array:
    """Sequence by sequence, summed in float32 over one axis of each."""
    dims = (((over[0],), (over[1],)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
