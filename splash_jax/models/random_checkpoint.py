"""Write a checkpoint of random weights, for benchmarks, tests and shapes whose weights are not there yet."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from splash_jax.models.config import ModelConfig
from splash_jax.models.deepseek_v3_weights import model_leaves


def write_random_checkpoint(folder: Path, config: Mapping[str, Any], seed: int = 0) -> Path:
    """A float32 checkpoint for a Hugging Face config of the DeepSeek-V3 family; returns `folder`.

    Weights have sign and spread, norms and router biases are far from neutral, so that a mistake shows.
    """
    cfg = ModelConfig.from_dict(config, "config")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1))
    sources: dict[str, tuple[int, ...]] = {}
    for leaf in jax.tree.leaves(model_leaves(cfg, 1)):
        sources.update(leaf.sources)
    rng = np.random.default_rng(seed)
    save_file({name: _draw(rng, name, shape) for name, shape in sorted(sources.items())}, folder / "model.safetensors")
    return folder


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if "norm" in name:
        value = rng.uniform(0.5, 1.5, shape)
    elif name.endswith("bias"):
        value = rng.normal(0, 0.1, shape)
    else:
        value = rng.normal(0, 1.6 / np.sqrt(shape[-1]), shape)
    return value.astype(np.float32)
