"""Streamed loading puts the file's own numbers, bit by bit, where each layout wants them; padding is zero."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from safetensors.numpy import load_file, save_file

from splash_jax.engine.build import draw_up, open_checkpoint
from splash_jax.engine.config import EngineConfig
from splash_jax.errors import CheckpointError, ConfigError
from splash_jax.layouts import ROLES, attention_mesh, make_layout, weight_spec
from splash_jax.models.checkpoint import Checkpoint
from splash_jax.models.config import ModelConfig, read_model_config
from splash_jax.models.deepseek_v3_weights import model_leaves
from splash_jax.models.load import leaf_bytes, load_tree, open_weights
from splash_jax.models.params import Leaf, in_blocks
from tests.support import write_checkpoint

# Six heads on three ranks; experts, vocabulary and widths that three does not divide.
UNEVEN = {
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "vocab_size": 47,
    "intermediate_size": 20,
    "moe_intermediate_size": 7,
    "n_routed_experts": 8,
    "n_group": 4,
    "attention_bias": True,
}
PLAIN = {"q_lora_rank": None, "tie_word_embeddings": True, "num_hidden_layers": 1, "vocab_size": 45, "hidden_size": 8}


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("uneven"), **UNEVEN)


def pad(x: np.ndarray, ranks: int, axis: int) -> np.ndarray:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % ranks)
    return np.pad(x, widths)


def expected(cfg: ModelConfig, file: dict[str, np.ndarray], ranks: int) -> dict[str, Any]:
    """The whole tree, written down apart from the code that loads it."""
    embed = file["model.embed_tokens.weight"]
    head = embed if cfg.tie_word_embeddings else file["lm_head.weight"]
    n, v, c, per_rank = cfg.qk_nope_head_dim, cfg.v_head_dim, cfg.kv_lora_rank, -(-cfg.num_experts // ranks)

    def mlp(p: str) -> dict[str, np.ndarray]:
        both = np.stack([file[p + "gate_proj.weight"], file[p + "up_proj.weight"]])
        return {"gate_up": pad(both, ranks, 1), "down": pad(file[p + "down_proj.weight"], ranks, 1)}

    def expert(p: str, number: int) -> dict[str, np.ndarray]:
        if number >= cfg.num_experts:
            return {name: np.zeros_like(x) for name, x in expert(p, 0).items()}
        q = f"{p}experts.{number}."
        both = np.concatenate([file[q + "gate_proj.weight"], file[q + "up_proj.weight"]])
        return {"gate_up": both, "down": file[q + "down_proj.weight"]}

    def layer(i: int) -> dict[str, Any]:
        p = f"model.layers.{i}."
        a = p + "self_attn."
        kv_b = file[a + "kv_b_proj.weight"].reshape(cfg.num_heads, n + v, c)
        attn = {"kv_a": file[a + "kv_a_proj_with_mqa.weight"], "kv_a_norm": file[a + "kv_a_layernorm.weight"]}
        q_b = a + "q_proj.weight"
        if cfg.q_lora_rank is not None:
            attn |= {"q_a": file[a + "q_a_proj.weight"], "q_a_norm": file[a + "q_a_layernorm.weight"]}
            q_b = a + "q_b_proj.weight"
        if cfg.attention_bias:
            names = {"kv_a_bias": "kv_a_proj_with_mqa", "o_bias": "o_proj", "q_a_bias": "q_a_proj"}
            attn |= {ours: file[f"{a}{theirs}.bias"] for ours, theirs in names.items()}
        found: dict[str, Any] = {
            "attn_norm": file[p + "input_layernorm.weight"],
            "mlp_norm": file[p + "post_attention_layernorm.weight"],
            "attn": attn,
            "moved": {
                "q_b": file[q_b],
                "w_uk": kv_b[:, :n].swapaxes(1, 2),
                "w_uv": kv_b[:, n:],
                "o": file[a + "o_proj.weight"],
            },
        }
        if i < cfg.first_dense_layers:
            return found | {"mlp": mlp(p + "mlp.")}
        slots = [[expert(p + "mlp.", rank * per_rank + slot) for rank in range(ranks)] for slot in range(per_rank)]
        found["moe"] = {
            "router": file[p + "mlp.gate.weight"],
            "router_bias": file[p + "mlp.gate.e_score_correction_bias"],
            "experts": [{part: np.stack([e[part] for e in slot]) for part in ("gate_up", "down")} for slot in slots],
        }
        return found | {"shared": mlp(p + "mlp.shared_experts.")}

    return {
        "embed": pad(embed, ranks, 0),
        "final_norm": file["model.norm.weight"],
        "lm_head": pad(head, ranks, 0),
        "layers": [layer(i) for i in range(cfg.num_layers)],
    }


def check(folder: Path, roles: str, ranks: int, dtype: str = "float32", sizes: dict[str, int] | None = None) -> None:
    sizes = sizes or {"rank": ranks}
    cfg, layout, mesh = read_model_config(folder), make_layout(roles, sizes), attention_mesh(sizes)
    leaves = jax.tree.map(lambda leaf: in_blocks(leaf, layout.head_blocks()), model_leaves(cfg, ranks))
    place = lambda leaf: NamedSharding(mesh, weight_spec(layout, leaf.dims))  # noqa: E731
    seen: list[tuple[int, int]] = []
    loaded = load_tree(Checkpoint.open(folder), leaves, place, dtype, lambda done, total: seen.append((done, total)))
    flat_leaves, treedef = jax.tree.flatten(leaves, is_leaf=lambda x: isinstance(x, Leaf))
    wanted = expected(cfg, load_file(folder / "model.safetensors"), ranks)
    assert jax.tree.structure(wanted) == jax.tree.structure(loaded) == treedef
    for leaf, array, whole in zip(flat_leaves, jax.tree.leaves(loaded), jax.tree.leaves(wanted), strict=True):
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" and leaf.dtype is None else np.float32
        assert (array.shape, array.dtype) == (leaf.shape, kind), leaf.sources
        assert array.sharding.is_equivalent_to(place(leaf), array.ndim)
        whole = whole.astype(kind)
        if leaf.moves:
            blocks = np.split(whole, ranks, leaf.dims.index("heads"))
            whole = np.concatenate([blocks[i] for i in layout.head_blocks()], leaf.dims.index("heads"))
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(whole[shard.index]).tobytes(), leaf.sources
    assert seen[-1][0] == seen[-1][1] == sum(leaf_bytes(leaf, dtype) for leaf in flat_leaves)
    assert seen == sorted(seen) and len(seen) == len(flat_leaves)


@pytest.mark.parametrize("role", ROLES)
def test_every_layout_gets_the_files_own_numbers(uneven, role):
    """T = 3: two heads each, three slots for eight experts, zeros at the end of what three does not divide."""
    check(uneven, role, 3)


@pytest.mark.parametrize("roles", ["node=dop,chip=cp", "node=cp,chip=dop", "node=dp,chip=tp", "node=tp,chip=dcp"])
def test_hybrids_get_the_heads_of_their_coordinates(uneven, roles):
    check(uneven, roles, 6, sizes={"node": 2, "chip": 3})


def test_one_rank_gets_everything_unpadded(uneven):
    check(uneven, "tp", 1)


def test_more_ranks_than_a_dimension_has_entries(tmp_path):
    """Two experts and four intermediate columns on six ranks: some ranks hold nothing but padding."""
    small = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "intermediate_size": 4}
    check(write_checkpoint(tmp_path, **(UNEVEN | small)), "dop", 6)


def test_the_serving_type_is_cast_to_and_the_router_is_not(uneven):
    check(uneven, "cp", 2, "bfloat16")


def test_plain_queries_and_a_tied_head(tmp_path):
    folder = write_checkpoint(tmp_path, **PLAIN)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    check(folder, "dop", 2)


def test_only_what_a_rank_needs_is_read(uneven, monkeypatch):
    """No read is larger than the block it fills: a rank never pulls a whole split weight through memory."""
    reads: list[int] = []
    read = Checkpoint.read

    def counted(self, name, index=None):
        block = read(self, name, index)
        if "embed_tokens" in name or "o_proj.weight" in name:
            reads.append(block.nbytes)
        return block

    monkeypatch.setattr(Checkpoint, "read", counted)
    check(uneven, "tp", 3)
    assert sum(reads) == 4 * (47 * 16 + 2 * 16 * 6 * 16) and max(reads) == 4 * 16 * 6 * 16 // 3


def damaged(folder: Path, target: Path, damage) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    damage(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


NORM, EXPERT = "model.norm.weight", "model.layers.1.mlp.experts.7.down_proj.weight"
DAMAGES = {
    "missing": (lambda t: [t.pop(n) for n in (NORM, EXPERT)], rf"2 missing: {EXPERT}, {NORM}"),
    "extra": (lambda t: t.update({"model.extra.weight": t[NORM]}), r"1 unexpected: model\.extra\.weight"),
    "misshapen": (lambda t: t.update({NORM: t[NORM][:5]}), rf"1 misshapen: {NORM} has \(5,\), expected \(16,\)"),
    "of another type": (lambda t: t.update({NORM: t[NORM].astype(np.int32)}), rf"{NORM} is int32"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_is_named_before_anything_is_read(uneven, tmp_path, monkeypatch, damage):
    change, words = DAMAGES[damage]
    folder = damaged(uneven, tmp_path / "damaged", change)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a tensor was read before all were checked"))
    config = EngineConfig(model=folder, num_devices=3, max_model_len=64, skip_tokenizer_init=True)
    with pytest.raises(CheckpointError, match=words) as error:
        open_checkpoint(draw_up(config))
    assert str(folder) in str(error.value)


MTP = {f"model.layers.2.{name}.weight": np.ones(3, np.float32) for name in ("enorm", "hnorm")}
ROTARY = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)}


def with_config(folder: Path, **changes: Any) -> ModelConfig:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_config(folder)


def test_what_serving_does_not_need_may_be_there_and_is_listed_in_one_line(uneven, tmp_path, caplog):
    folder = damaged(uneven, tmp_path / "more", lambda tensors: tensors.update(MTP | ROTARY))
    cfg, checkpoint = with_config(folder, num_nextn_predict_layers=1), Checkpoint.open(folder)
    with caplog.at_level(logging.INFO, "splash_jax"):
        open_weights(cfg, folder)
        open_weights(read_model_config(uneven), uneven)
    count, size = len(checkpoint.names()), checkpoint.nbytes
    assert caplog.messages == [
        f"weights of {folder}: {count} tensors (float32, float64), {size} bytes in 1 file; ignored 3:"
        " model.layers.0.self_attn.rotary_emb.inv_freq, model.layers.2.* (2).",
        f"weights of {uneven}: {count - 3} tensors (float32), {size - 24 - 32} bytes in 1 file; all read.",
    ]


def test_promised_prediction_layers_may_be_absent(uneven, tmp_path):
    folder = damaged(uneven, tmp_path / "fewer", lambda tensors: None)
    open_weights(with_config(folder, num_nextn_predict_layers=1), folder)


def test_layers_beyond_those_of_the_config_are_refused(uneven, tmp_path):
    folder = damaged(uneven, tmp_path / "more", lambda tensors: tensors.update(MTP))
    words = "hold layers 2, beyond num_hidden_layers 2 and num_nextn_predict_layers 0. Correct config.json"
    with pytest.raises(CheckpointError, match=words):
        open_weights(read_model_config(folder), folder)
    with pytest.raises(CheckpointError, match="hold layers 1, 2, beyond num_hidden_layers 1 and num_nextn_predict_lay"):
        open_weights(with_config(folder, num_hidden_layers=1), folder)


HEADS = {
    "the embedding": (lambda x: x, False),
    "the embedding in another type": (lambda x: x.astype(np.float64), False),
    "another number at its end": (lambda x: np.concatenate([x[:-1], x[-1:] + 1]), True),
    "another shape": (lambda x: x[:3], True),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_said(tmp_path, caplog, head):
    change, told = HEADS[head]
    folder = damaged(
        write_checkpoint(tmp_path / "tied", **PLAIN), tmp_path / "head",
        lambda tensors: tensors.update({"lm_head.weight": change(tensors["model.embed_tokens.weight"])}),
    )  # fmt: skip
    open_weights(read_model_config(folder), folder)
    words = (
        "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight and is not read. Set"
        " tie_word_embeddings to false if it is the head."
    )
    assert caplog.messages == ([f"{folder / 'config.json'}: {words}"] if told else [])


def test_quantised_weights_are_not_opened(uneven, tmp_path, monkeypatch):
    folder = damaged(uneven, tmp_path / "fp8", lambda tensors: None)
    monkeypatch.setattr(Checkpoint, "open", lambda *_: pytest.fail("the weights were opened"))
    with pytest.raises(ConfigError, match="quantization_config says fp8, and FP8 and other quantised weights cannot"):
        open_weights(with_config(folder, quantization_config={"quant_method": "fp8"}), folder)
