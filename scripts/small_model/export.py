"""Write the trained model as a Hugging Face DeepSeek-V3 checkpoint with tokenizer and model card."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from safetensors.flax import save_file
from tokenizers import Tokenizer

from small_model.data import ASSISTANT, BOS, EOS, SOURCES, USER
from small_model.model import MLP, DeepseekV3, Layer, ModelConfig

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
YARN_FIELDS = {
    "factor": "yarn_factor",
    "original_max_position_embeddings": "yarn_original_positions",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale",
}


def config_json(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The config.json of the checkpoint."""
    yarn = {key: getattr(config, field) for key, field in YARN_FIELDS.items()}
    shape = {key: value for key, value in dataclasses.asdict(config).items() if not key.startswith("yarn_")}
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        **shape,
        "num_key_value_heads": config.num_attention_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "rope_scaling": {"type": "yarn", **yarn},
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
    }


def mlp_tensors(prefix: str, mlp: MLP) -> dict[str, jax.Array]:
    """Projections of one feed-forward layer as [out, in]."""
    projections = {"gate_proj": mlp.gate, "up_proj": mlp.up, "down_proj": mlp.down}
    return {f"{prefix}.{name}.weight": param[...].T for name, param in projections.items()}


def layer_tensors(prefix: str, layer: Layer) -> dict[str, jax.Array]:
    """All tensors of one decoder layer under their Hugging Face names."""
    attention, mlp = layer.attention, layer.mlp
    tensors = {
        "input_layernorm.weight": layer.input_norm.scale[...],
        "post_attention_layernorm.weight": layer.post_norm.scale[...],
        "self_attn.q_a_proj.weight": attention.q_a[...].T,
        "self_attn.q_a_layernorm.weight": attention.q_a_norm.scale[...],
        "self_attn.q_b_proj.weight": attention.q_b[...].T,
        "self_attn.kv_a_proj_with_mqa.weight": attention.kv_a[...].T,
        "self_attn.kv_a_layernorm.weight": attention.kv_a_norm.scale[...],
        "self_attn.kv_b_proj.weight": attention.kv_b[...].T,
        "self_attn.o_proj.weight": attention.o[...].T,
    }
    if isinstance(mlp, MLP):
        tensors |= mlp_tensors("mlp", mlp)
    else:
        tensors["mlp.gate.weight"] = mlp.router[...].T
        tensors["mlp.gate.e_score_correction_bias"] = mlp.bias[...]
        tensors |= mlp_tensors("mlp.shared_experts", mlp.shared)
        for expert in range(mlp.bias.shape[0]):
            name = f"mlp.experts.{expert}"
            tensors[f"{name}.gate_proj.weight"] = mlp.gate[...][:, expert].T
            tensors[f"{name}.up_proj.weight"] = mlp.up[...][:, expert].T
            tensors[f"{name}.down_proj.weight"] = mlp.down[...][expert].T
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def checkpoint_tensors(model: DeepseekV3) -> dict[str, jax.Array]:
    """All tensors under their Hugging Face names: bfloat16, except the float32 router."""
    tensors = {
        "model.embed_tokens.weight": model.embed[...],
        "model.norm.weight": model.norm.scale[...],
        "lm_head.weight": model.lm_head[...].T,
    }
    for index, layer in enumerate(model.layers):
        tensors |= layer_tensors(f"model.layers.{index}", layer)
    return {
        name: jnp.asarray(tensor, jnp.float32 if ".mlp.gate." in name else jnp.bfloat16)
        for name, tensor in tensors.items()
    }


def model_card(facts: dict[str, str], samples: list[tuple[str, str]]) -> str:
    """README.md of the checkpoint."""
    sources = "\n".join(
        f"| `{source.package}` {source.version} ({source.kind}) | {source.content} | {source.licence} |"
        for source in SOURCES.values()
    )
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    shown = "\n\n".join(f"> **{prompt}**{text}".replace("\n", "\n> ") for prompt, text in samples)
    return f"""---
license: cc-by-sa-4.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# A small trained DeepSeek-V3 model

A real, trained checkpoint in the DeepSeek-V3 format (multi-head latent attention, YaRN, mixture of experts
with group-limited sigmoid routing and bias load balancing), small enough to ship with SPLASH for JAX. It is
for tests, demonstrations and benchmarks: it writes English, but what it says is mostly made up.

{"| | |"}
| --- | --- |
{rows}

## Training data

| package | text used | licence |
| --- | --- | --- |
{sources}

The text was reduced to plain ASCII prose and partly rewritten as question and answer. Documents are split by
a hash of their key: 2 % are held out and never trained on. Since most of the text is CC BY-SA 4.0 (by the
contributors of Wikipedia and Wikibooks), the weights are offered under the same licence.

## Use

`<|bos|>` starts a document (the tokenizer adds it), `<|eos|>` ends it; the chat template renders
`<|bos|><|user|>question<|assistant|>`. Questions it has seen look like "What is X?", "Tell me about X.",
"How do I make X?" and 'What does "X" mean?'.

## Samples

Prompt in bold, sampled from the exported weights at temperature 0.6:

{shown}

## Reproduce

`python scripts/train_small_model.py` downloads the packages, trains the tokenizer and the model, and writes
this folder.
"""


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write content as indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def export(folder: Path, model: DeepseekV3, tokenizer: Tokenizer, card: str) -> None:
    """Write the whole checkpoint; the weights are replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", config_json(model.config, tokenizer))
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": bos, "eos_token_id": eos, "do_sample": True, "temperature": 0.6, "top_p": 0.95},
    )
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": EOS,
            "additional_special_tokens": [USER, ASSISTANT],
            "model_max_length": model.config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (folder / "README.md").write_text(card)
    partial = folder / "model.safetensors.part"
    save_file(checkpoint_tensors(model), str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, folder / "model.safetensors")
