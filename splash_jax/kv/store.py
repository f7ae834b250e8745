"""The device half of the paged KV store: one array per layer, a slab of pages per rank."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from splash_jax.layouts import pool_spec
from splash_jax.ownership import KVShape, Layout


def pool_struct(
    mesh: Mesh, layout: Layout, kv: KVShape, pages: int, width: int, dtype: str
) -> jax.ShapeDtypeStruct:
    """One layer's pool [T, pages, page_size, width], sharded by rank."""
    sharding = NamedSharding(mesh, pool_spec(layout))
    return jax.ShapeDtypeStruct((layout.size, pages, kv.page_size, width), jnp.dtype(dtype), sharding=sharding)


def empty_pools(struct: jax.ShapeDtypeStruct, num_layers: int) -> list[jax.Array]:
    """A zeroed pool for every layer."""
    zeros = jax.jit(lambda: jnp.zeros(struct.shape, struct.dtype), out_shardings=struct.sharding)
    return [zeros() for _ in range(num_layers)]
