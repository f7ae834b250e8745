"""The oracle: the plain softmax of `mla_attention`, over rows stored in either format."""

import jax
import jax.numpy as jnp

from pallas_kernels.formats import is_fp8, unpack_fp8
from pallas_kernels.mla_attention import ref
from pallas_kernels.mla_attention.table import PageTable


def decode(
    q: jax.Array, pool: jax.Array, pages: jax.Array, held: jax.Array, *, value_width: int
) -> tuple[jax.Array, jax.Array]:
    """See `api.mla_decode`. Accepts every shape."""
    if is_fp8(pool):
        own = pool[pages.reshape(-1)]
        pool = unpack_fp8(own, value_width)
        pages = jnp.arange(pages.size, dtype=jnp.int32).reshape(pages.shape)
    table = PageTable(pages, held, jnp.zeros_like(held))
    rows = q.shape[0]
    return ref.attend(q, held - 1, pool, table, decode=rows, tile=1, value_width=value_width, shares=1, interleave=1)
