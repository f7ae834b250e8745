"""The oracle: the selected rows gathered, then the plain softmax of `mla_attention`."""

import jax
import jax.numpy as jnp

from pallas_kernels.formats import is_fp8, unpack_fp8
from pallas_kernels.mla_attention import ref
from pallas_kernels.mla_attention.table import PageTable
from pallas_kernels.sparse_mla.places import places_of


def attend(
    q: jax.Array, pool: jax.Array, selected: jax.Array, pages: jax.Array, *, value_width: int
) -> tuple[jax.Array, jax.Array]:
    """See `api.sparse_mla`. Accepts every shape."""
    R = q.shape[0]
    places = places_of(selected, pages, pool.shape[1])
    first = jnp.take_along_axis(places, jnp.argsort(places < 0, 1, stable=True), 1)  # those that there are
    rows = pool.reshape(-1, pool.shape[-1])[jnp.maximum(first, 0)]
    rows = unpack_fp8(rows, value_width) if is_fp8(pool) else rows
    held = (places >= 0).sum(1, dtype=jnp.int32)
    table = PageTable(jnp.arange(R, dtype=jnp.int32)[:, None], held, jnp.zeros_like(held))
    return ref.attend(q, held - 1, rows, table, decode=R, tile=1, value_width=value_width, shares=1, interleave=1)
