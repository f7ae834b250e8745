"""The oracle: every key of every row at once, in plain jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import refuse_fp8
from pallas_kernels.mla_attention.table import PageTable


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
    refuse_fp8("ref", pool)
    tiles = table.pages.shape[0] - decode
    seq = jnp.concatenate([jnp.arange(decode), decode + jnp.repeat(jnp.arange(tiles), tile)]).astype(jnp.int32)
    local = jnp.arange(table.pages.shape[1] * pool.shape[1])[None]
    key_positions = (local // interleave * shares + table.lag[seq][:, None]) * interleave + local % interleave
    visible = (local < table.held[seq][:, None]) & (key_positions <= positions[:, None])
    keys = pool[table.pages[seq]].reshape(q.shape[0], -1, pool.shape[-1])
    keys = jnp.where(visible[..., None], keys, 0).astype(jnp.float32)
    scores = jnp.einsum("rhd,rkd->rhk", q.astype(jnp.float32), keys, precision="highest")
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    weights = jnp.where(visible[:, None], jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None]), 0.0)
    return jnp.einsum("rhk,rkd->rhd", weights, keys[..., :value_width], precision="highest"), lse
