"""Where every weight of a DeepSeek-V3 checkpoint goes. Names on the left are ours, on the right Hugging Face's.

Letters: d hidden, H heads, r query rank, c latent, n non-rotary, p rotary, v value, E experts, f expert width,
F dense width, V vocabulary.
"""

from typing import Any

import numpy as np

from splash_jax.models.checkpoint import Checkpoint
from splash_jax.models.config import ModelConfig
from splash_jax.models.params import Index, Leaf, clip, extent, fill, linear, padded, vector

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def layer_kind(cfg: ModelConfig, layer: int) -> str:
    """ "dense" or "moe": layers of one kind share their programs."""
    return "dense" if layer < cfg.first_dense_layers or cfg.num_experts == 0 else "moe"


def model_leaves(cfg: ModelConfig, ranks: int) -> dict[str, Any]:
    """All weights: {"embed", "final_norm", "lm_head", "layers": [one dict per layer]}, padded for `ranks` ranks."""
    V, d = cfg.vocab_size, cfg.hidden_size
    head = EMBEDDING if cfg.tie_word_embeddings else HEAD
    return {
        "embed": linear(EMBEDDING, V, d, ("ranks", None), ranks),
        "final_norm": vector("model.norm.weight", d),
        "lm_head": linear(head, V, d, ("ranks", None), ranks),
        "layers": [_layer(cfg, i, ranks) for i in range(cfg.num_layers)],
    }


def ignored(cfg: ModelConfig, name: str) -> bool:
    """Tensors a checkpoint may hold that serving does not need: multi-token-prediction layers, rotary buffers."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if cfg.tie_word_embeddings and name == HEAD:
        return True
    layer = layer_of(name)
    return layer is not None and cfg.num_layers <= layer < cfg.num_layers + cfg.num_nextn_predict_layers


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to by its name; None where it belongs to none."""
    parts = name.split(".")
    return int(parts[2]) if name.startswith("model.layers.") and parts[2].isdecimal() else None


def _layer(cfg: ModelConfig, layer: int, ranks: int) -> dict[str, Any]:
    p = f"model.layers.{layer}."
    d = cfg.hidden_size
    weights: dict[str, Any] = {
        "attn_norm": vector(p + "input_layernorm.weight", d),
        "mlp_norm": vector(p + "post_attention_layernorm.weight", d),
        "attn": _attention(cfg, p + "self_attn."),
        "moved": _moved(cfg, p + "self_attn."),
    }
    if layer_kind(cfg, layer) == "dense":
        return weights | {"mlp": _mlp(p + "mlp.", d, cfg.intermediate_size, ranks)}
    weights["moe"] = _moe(cfg, p + "mlp.", ranks)
    if cfg.num_shared_experts:
        width = cfg.num_shared_experts * cfg.moe_intermediate_size
        weights["shared"] = _mlp(p + "mlp.shared_experts.", d, width, ranks)
    return weights


def _attention(cfg: ModelConfig, p: str) -> dict[str, Leaf]:
    """The part of attention that every rank holds in every layout."""
    d, r, c, rope = cfg.hidden_size, cfg.q_lora_rank, cfg.kv_lora_rank, cfg.qk_rope_head_dim
    leaves = {
        "kv_a": linear(p + "kv_a_proj_with_mqa.weight", c + rope, d),
        "kv_a_norm": vector(p + "kv_a_layernorm.weight", c),
    }
    if r is not None:
        leaves["q_a"] = linear(p + "q_a_proj.weight", r, d)
        leaves["q_a_norm"] = vector(p + "q_a_layernorm.weight", r)
    if cfg.attention_bias:
        leaves["kv_a_bias"] = vector(p + "kv_a_proj_with_mqa.bias", c + rope)
        leaves["o_bias"] = vector(p + "o_proj.bias", d)
        if r is not None:
            leaves["q_a_bias"] = vector(p + "q_a_proj.bias", r)
    return leaves


def _moved(cfg: ModelConfig, p: str) -> dict[str, Leaf]:
    """The projections that a layout splits by head or keeps whole (Q-B, KV-B and O of Eq. 9)."""
    d, H, n, v = cfg.hidden_size, cfg.num_heads, cfg.qk_nope_head_dim, cfg.v_head_dim
    qk = n + cfg.qk_rope_head_dim
    q_in = d if cfg.q_lora_rank is None else cfg.q_lora_rank
    q_name = "q_proj.weight" if cfg.q_lora_rank is None else "q_b_proj.weight"
    return {
        "q_b": linear(p + q_name, H * qk, q_in, ("heads", None)),
        "w_uk": _kv_b(cfg, p + "kv_b_proj.weight", slice(0, n), transpose=True),
        "w_uv": _kv_b(cfg, p + "kv_b_proj.weight", slice(n, n + v), transpose=False),
        "o": linear(p + "o_proj.weight", d, H * v, (None, "heads")),
    }


def _kv_b(cfg: ModelConfig, name: str, rows: slice, *, transpose: bool) -> Leaf:
    """Some rows of every head of KV-B: w_uv [H, v, c], or transposed w_uk [H, c, n]."""
    H, c, per_head = cfg.num_heads, cfg.kv_lora_rank, cfg.qk_nope_head_dim + cfg.v_head_dim
    width = rows.stop - rows.start

    def read(ckpt: Checkpoint, index: Index) -> np.ndarray:
        heads = index[0]
        block = ckpt.read(name, (slice(heads.start * per_head, heads.stop * per_head), slice(0, c)))
        block = block.reshape(heads.stop - heads.start, per_head, c)[:, rows]
        return (block.swapaxes(1, 2) if transpose else block)[:, index[1], index[2]]

    shape = (H, c, width) if transpose else (H, width, c)
    return Leaf(shape=shape, dims=("heads", None, None), sources={name: (H * per_head, c)}, read=read)


def _mlp(p: str, d: int, width: int, ranks: int) -> dict[str, Leaf]:
    """A gated MLP whose width is cut over the ranks: gate_up [2, F, d], down [d, F]."""
    names = (p + "gate_proj.weight", p + "up_proj.weight")

    def read(ckpt: Checkpoint, index: Index) -> np.ndarray:
        blocks = [ckpt.read(name, (clip(index[1], width), index[2])) for name in names[index[0]]]
        return fill(extent(index), np.stack(blocks))

    gate_up = Leaf(
        shape=(2, padded(width, ranks), d),
        dims=(None, "ranks", None),
        sources=dict.fromkeys(names, (width, d)),
        read=read,
    )
    return {"gate_up": gate_up, "down": linear(p + "down_proj.weight", d, width, (None, "ranks"), ranks)}


def _moe(cfg: ModelConfig, p: str, ranks: int) -> dict[str, Any]:
    """The router, in float32, and the routed experts: rank r holds experts r n .. r n + n - 1.

    `experts[j]` is the j-th expert of every rank, gate_up [ranks, 2 f, d] and down [ranks, d, f]: an array for each,
    so that a program can run one of them without copying it out of a stack.
    """
    E, d = cfg.num_experts, cfg.hidden_size
    per_rank = padded(E, ranks) // ranks
    return {
        "router": linear(p + "gate.weight", E, d, dtype="float32"),
        "router_bias": vector(p + "gate.e_score_correction_bias", E, dtype="float32"),
        "experts": [_expert_slot(cfg, p, ranks, per_rank, slot) for slot in range(per_rank)],
    }


def _expert_slot(cfg: ModelConfig, p: str, ranks: int, per_rank: int, slot: int) -> dict[str, Leaf]:
    """One expert of every rank; zeros where a rank has none left."""
    d, f = cfg.hidden_size, cfg.moe_intermediate_size
    experts = [rank * per_rank + slot for rank in range(ranks)]

    def leaf(shape: tuple[int, int], kinds: tuple[str, ...], size: tuple[int, int]) -> Leaf:
        def read(ckpt: Checkpoint, index: Index) -> np.ndarray:
            blocks = []
            for expert in experts[index[0]]:
                if expert < cfg.num_experts:
                    parts = [ckpt.read(f"{p}experts.{expert}.{kind}_proj.weight") for kind in kinds]
                    blocks.append(np.concatenate(parts)[index[1:]])
                else:
                    blocks.append(np.zeros(extent(index)[1:], np.float32))
            return np.stack(blocks)

        real = [expert for expert in experts if expert < cfg.num_experts]
        sources = {f"{p}experts.{expert}.{kind}_proj.weight": size for expert in real for kind in kinds}
        return Leaf(shape=(ranks, *shape), dims=("ranks", None, None), sources=sources, read=read)

    return {"gate_up": leaf((2 * f, d), ("gate", "up"), (f, d)), "down": leaf((d, f), ("down",), (d, f))}
