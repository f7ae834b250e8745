"""The device half of the paged KV store: one array per layer, a slab of pages per rank."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from splash_jax.ownership import KVShape


def pool_struct(sharding: NamedSharding, kv: KVShape, pages: int, width: int, dtype: str) -> jax.ShapeDtypeStruct:
    """One layer's pool [T, pages, page_size, width], its leading dimension dealt over all ranks by `sharding`.

    It holds numbers of `dtype`; on CPU those of 16 bits lie in it as unsigned words, see `stored_dtype`.
    """
    platform = next(iter(sharding.device_set)).platform
    shape = (sharding.mesh.size, pages, kv.page_size, width)
    return jax.ShapeDtypeStruct(shape, stored_dtype(dtype, platform), sharding=sharding)


def stored_dtype(dtype: str, platform: str) -> jnp.dtype:
    """What a pool of numbers of `dtype` is an array of.

    XLA:CPU cannot write a few rows of a bfloat16 array in place: it turns the whole array to float32 and back. Of words
    that hold the numbers' bits it can.
    """
    kind = jnp.dtype(dtype)
    return jnp.dtype(jnp.uint16) if platform == "cpu" and kind.itemsize == 2 else kind


def empty_pools(struct: jax.ShapeDtypeStruct, num_layers: int) -> list[jax.Array]:
    """A zeroed pool for every layer."""
    zeros = jax.jit(lambda: jnp.zeros(struct.shape, struct.dtype), out_shardings=struct.sharding)
    return [zeros() for _ in range(num_layers)]
