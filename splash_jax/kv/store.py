"""The device half of the paged KV store: one array per layer, a slab of pages per rank."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from splash_jax.ownership import KVShape


def pool_struct(sharding: NamedSharding, kv: KVShape, pages: int, width: int, dtype: str) -> jax.ShapeDtypeStruct:
    """One layer's pool [T, pages, page_size, width], its leading dimension dealt over all ranks by `sharding`."""
    ranks = sharding.mesh.size
    return jax.ShapeDtypeStruct((ranks, pages, kv.page_size, width), jnp.dtype(dtype), sharding=sharding)


def empty_pools(struct: jax.ShapeDtypeStruct, num_layers: int) -> list[jax.Array]:
    """A zeroed pool for every layer."""
    zeros = jax.jit(lambda: jnp.zeros(struct.shape, struct.dtype), out_shardings=struct.sharding)
    return [zeros() for _ in range(num_layers)]
