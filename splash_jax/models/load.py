"""Stream a checkpoint into device arrays, one weight at a time, each rank reading only what it holds."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from splash_jax.models.checkpoint import Checkpoint
from splash_jax.models.params import Index, Leaf

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def leaf_bytes(leaf: Leaf, dtype: str) -> int:
    """Bytes of one whole copy of a weight served in `dtype`."""
    return int(np.prod(leaf.shape)) * jnp.dtype(leaf.dtype or dtype).itemsize


def load_leaf(ckpt: Checkpoint, leaf: Leaf, sharding: NamedSharding, dtype: str) -> jax.Array:
    """One weight in its sharding. Ranks that hold the same block, one after another, share one reading of it."""
    kind = jnp.dtype(leaf.dtype or dtype)
    blocks: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def block(index: Index | None) -> np.ndarray:
        index = index or ()
        whole = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, leaf.shape, strict=True))
        key = tuple((s.start, s.stop) for s in whole)
        if key not in blocks:
            blocks.clear()
            blocks[key] = np.ascontiguousarray(leaf.read(ckpt, whole).astype(kind))
        return blocks[key]

    return jax.make_array_from_callback(leaf.shape, sharding, block)


def load_tree(
    ckpt: Checkpoint,
    leaves: Mapping[str, Any],
    sharding_of: Callable[[Leaf], NamedSharding],
    dtype: str,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Load a nested dict of leaves into a nested dict of arrays, in the order of the tree."""
    flat, treedef = jax.tree.flatten(leaves)
    total, done, arrays = sum(leaf_bytes(leaf, dtype) for leaf in flat), 0, []
    for leaf in flat:
        arrays.append(load_leaf(ckpt, leaf, sharding_of(leaf), dtype))
        done += leaf_bytes(leaf, dtype)
        if progress:
            progress(done, total)
    return jax.tree.unflatten(treedef, arrays)
