"""How many bytes of a model's weights a layout may place as it likes, and how many stay as they are."""

import jax

from splash_jax.models.config import ModelConfig
from splash_jax.models.deepseek_v3_weights import model_leaves
from splash_jax.models.load import leaf_bytes
from splash_jax.ownership import KVShape, StateBytes
from splash_jax.runtime.shapes import Shapes


def state_bytes(model: ModelConfig, dtype: str, ranks: int, kv: KVShape) -> StateBytes:
    """Bytes of a model's weights by what a layout may do with them."""
    leaves = model_leaves(model, ranks)
    flat = jax.tree.leaves(leaves)
    moved = list(leaves["layers"][0]["moved"].values())
    common = sum(leaf_bytes(leaf, dtype) // (ranks if "ranks" in leaf.dims else 1) for leaf in flat if not leaf.moves)
    return StateBytes(
        projections=sum(leaf_bytes(leaf, dtype) for leaf in moved),
        common=common,
        kv_per_token=kv.bytes_per_token,
        num_layers=model.num_layers,
    )


def sampler_bytes(shapes: Shapes) -> int:
    """Bytes per rank of what the sampler remembers: a token per slot, and token counts where there are penalties."""
    counts = shapes.slots * shapes.model.vocab_size if shapes.penalties else 1
    return 4 * (shapes.slots + counts)
