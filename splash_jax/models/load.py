"""Open a model's weights, and stream them into device arrays, one at a time, each rank reading only what it holds."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from splash_jax.errors import CheckpointError
from splash_jax.models.checkpoint import Checkpoint, some
from splash_jax.models.config import ModelConfig, refuse_quantised
from splash_jax.models.deepseek_v3_weights import EMBEDDING, HEAD, ignored, layer_of, model_leaves
from splash_jax.models.params import Index, Leaf

Progress = Callable[[int, int], None]  # bytes done, bytes in all

log = logging.getLogger("splash_jax")


def open_weights(cfg: ModelConfig, folder: Path) -> Checkpoint:
    """Open the weights of a model and compare every tensor with what the model wants; logs one line of what is there.

    Headers are read, and of tensors that are there twice the numbers. Raises ConfigError for quantised weights and
    CheckpointError for weights that are damaged or do not fit the config.
    """
    refuse_quantised(cfg, folder)
    checkpoint = Checkpoint.open(folder)
    layers, more = cfg.num_layers, cfg.num_nextn_predict_layers
    if beyond := sorted({i for name in checkpoint.names() if (i := layer_of(name)) is not None and i >= layers + more}):
        raise CheckpointError(
            f"the weights in {folder} do not fit config.json: they hold layers {some(map(str, beyond))}, beyond"
            f" num_hidden_layers {layers} and num_nextn_predict_layers {more}. Correct config.json, or take it from the"
            " model's own release."
        )
    expected: dict[str, tuple[int, ...]] = {}
    for leaf in jax.tree.leaves(model_leaves(cfg, 1)):
        expected.update(leaf.sources)
    checkpoint.check(expected, lambda name: ignored(cfg, name))
    if cfg.tie_word_embeddings and HEAD in checkpoint.names() and not checkpoint.same(HEAD, EMBEDDING):
        log.warning(
            "%s: tie_word_embeddings is true, but %s differs from %s and is not read. Set tie_word_embeddings to false"
            " if it is the head.", folder / "config.json", HEAD, EMBEDDING,
        )  # fmt: skip
    log.info("weights of %s: %s", folder, _summary(checkpoint, set(expected)))
    return checkpoint


def _summary(checkpoint: Checkpoint, read: set[str]) -> str:
    """What a checkpoint holds, and what of it is left unread: layers are named once, with their count of tensors."""
    names = checkpoint.names()
    kinds = Counter(str(checkpoint.dtype(name)) for name in names)
    unread = Counter(
        name if (layer := layer_of(name)) is None or name.endswith("inv_freq") else f"model.layers.{layer}.*"
        for name in names
        if name not in read
    )
    listed = some(name if count == 1 else f"{name} ({count})" for name, count in sorted(unread.items()))
    return (
        f"{len(names)} tensors ({', '.join(sorted(kinds))}), {checkpoint.nbytes} bytes in {len(checkpoint.files)}"
        f" file{'s' * (len(checkpoint.files) > 1)}; {f'ignored {unread.total()}: {listed}' if unread else 'all read'}."
    )


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
