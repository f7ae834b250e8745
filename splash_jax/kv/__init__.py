"""Paged key-value storage: host page accounting here, device arrays in `kv.store`."""

from splash_jax.kv.pool import PagePool, filled_pool
from splash_jax.kv.twin import TwinPool

__all__ = ["PagePool", "TwinPool", "filled_pool"]
