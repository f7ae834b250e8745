"""ModelConfig: both spellings of config.json, and a clear refusal of everything else."""

import json
import re
from pathlib import Path

import pytest

from splash_jax.errors import CheckpointError, ConfigError
from splash_jax.models import config as config_module
from splash_jax.models.config import ModelConfig, read_model_config, refuse_quantised, serving_dtype

HF5 = {
    "model_type": "deepseek_v3",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "intermediate_size": 128,
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 0,
    "dtype": "float32",
}
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 64,
}
LEGACY = {k: v for k, v in HF5.items() if k not in ("rope_parameters", "rope_interleave", "dtype")} | {
    "torch_dtype": "bfloat16",
    "rope_theta": 50000,
    "rope_scaling": YARN,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
EXPERT_KEYS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "moe_intermediate_size",
)


def read(base: dict[str, object], **changes: object) -> ModelConfig:
    return ModelConfig.from_dict({**base, **changes}, "config.json")


def test_transformers_5_spelling():
    cfg = read(HF5)
    assert (cfg.num_layers, cfg.num_heads, cfg.num_experts, cfg.first_dense_layers) == (3, 8, 16, 1)
    assert (cfg.q_lora_rank, cfg.v_head_dim, cfg.eos_token_ids, cfg.dtype) == (48, 20, (1,), "float32")
    assert (cfg.rope.theta, cfg.rope.type, cfg.rope.interleave, cfg.rope.factor) == (
        10000,
        "default",
        True,
        1,
    )


def test_hub_spelling():
    cfg = read(LEGACY)
    rope = cfg.rope
    assert cfg.dtype == "bfloat16"
    assert (rope.theta, rope.type, rope.factor, rope.interleave) == (50000.0, "yarn", 8.0, True)
    assert (rope.beta_fast, rope.beta_slow, rope.mscale, rope.mscale_all_dim) == (32.0, 1.0, 1.0, 0.707)
    assert rope.original_max_position == 64


def test_both_spellings_of_one_model_are_equal():
    theta = {"rope_theta": 50000, "rope_type": "yarn"}
    scaling = {k: v for k, v in YARN.items() if k != "type"}
    assert read(HF5, dtype="bfloat16", rope_parameters={**scaling, **theta}) == read(LEGACY)
    assert read(LEGACY, rope_scaling={**scaling, "rope_type": "yarn"}) == read(LEGACY)


def test_yarn_defaults():
    rope = read(LEGACY, rope_scaling={"type": "yarn", "factor": 4, "mscale": 0}).rope
    assert (rope.beta_fast, rope.beta_slow, rope.mscale, rope.mscale_all_dim) == (32.0, 1.0, None, None)
    assert rope.original_max_position == 512
    outer = read(LEGACY, original_max_position_embeddings=128).rope
    assert outer.original_max_position == 128


def test_half_split_rope_and_no_scaling():
    cfg = read(LEGACY, rope_interleave=False, rope_scaling=None)
    assert (cfg.rope.interleave, cfg.rope.type) == (False, "default")


def test_kimi_k2_is_read_as_v3():
    kimi = read(LEGACY, model_type="kimi_k2", n_group=1, topk_group=1)
    assert (kimi.model_type, kimi.n_group) == ("kimi_k2", 1)


def test_plain_queries_and_several_end_tokens():
    cfg = read(HF5, q_lora_rank=None, eos_token_id=[1, 7], bos_token_id=None)
    assert (cfg.q_lora_rank, cfg.eos_token_ids, cfg.bos_token_id) == (None, (1, 7), None)
    assert read(HF5, eos_token_id=None).eos_token_ids == ()


def test_a_model_without_experts_is_dense_throughout():
    dense = {k: v for k, v in HF5.items() if k not in EXPERT_KEYS}
    cfg = read(dense)
    assert (cfg.num_experts, cfg.num_experts_per_tok, cfg.num_shared_experts) == (0, 0, 0)
    assert (cfg.first_dense_layers, cfg.moe_intermediate_size) == (3, 0)


def test_layer_types_stand_for_the_dense_prefix():
    without = {k: v for k, v in HF5.items() if k != "first_k_dense_replace"}
    assert read(without, mlp_layer_types=["dense", "dense", "sparse"]).first_dense_layers == 2
    assert read(HF5, mlp_layer_types=["dense", "sparse", "sparse"]).first_dense_layers == 1


@pytest.mark.parametrize(
    "key",
    [
        *(k for k in HF5 if k.endswith(("_rank", "_dim", "_size")) and k != "head_dim"),
        *(
            "model_type",
            "num_hidden_layers",
            "num_attention_heads",
            "rms_norm_eps",
            "max_position_embeddings",
        ),
        *("num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
        "first_k_dense_replace",
    ],
)
def test_a_missing_key_is_named(key: str):
    with pytest.raises(ConfigError, match=rf"^config.json: key '{key}' is missing\. Add it, or take"):
        ModelConfig.from_dict({k: v for k, v in HF5.items() if k != key}, "config.json")


def test_missing_theta_and_factor_are_named():
    with pytest.raises(ConfigError, match="key 'rope_theta' is missing"):
        read(LEGACY, rope_theta=None)
    with pytest.raises(ConfigError, match=r"config.json: rope_scaling: key 'factor' is missing"):
        read(LEGACY, rope_scaling={"type": "yarn"})


def test_another_architecture_is_named_with_those_accepted():
    with pytest.raises(
        ConfigError, match=r"model_type is 'llama'; supported: deepseek_v3, kimi_k2. Serve a checkpoint"
    ):
        read(HF5, model_type="llama")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", 64.0, "hidden_size is 64.0, expected an integer of at least 1. Correct the value."),
        ("hidden_size", "64", "hidden_size is '64', expected an integer of at least 1"),
        ("num_hidden_layers", True, "num_hidden_layers is True, expected an integer"),
        ("vocab_size", 0, "vocab_size is 0, expected an integer of at least 1"),
        ("max_position_embeddings", 10**400, "expected an integer of at most 2147483647"),
        ("num_hidden_layers", 10**6, "num_hidden_layers is 1000000, expected an integer of at most 4096"),
        ("n_routed_experts", 10**6, "n_routed_experts is 1000000, expected an integer of at most 16384"),
        ("rms_norm_eps", 10**400, "expected a finite number above 0"),
        ("q_lora_rank", 0, "q_lora_rank is 0, expected an integer of at least 1"),
        ("n_shared_experts", -1, "n_shared_experts is -1, expected an integer of at least 0"),
        ("rms_norm_eps", "1e-6", "rms_norm_eps is '1e-6', expected a finite number above 0"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan, expected a finite number above 0"),
        ("routed_scaling_factor", float("inf"), "routed_scaling_factor is inf, expected a finite number"),
        ("rope_interleave", "true", "rope_interleave is 'true', expected true or false"),
        ("norm_topk_prob", 1, "norm_topk_prob is 1, expected true or false"),
        ("eos_token_id", "</s>", "eos_token_id is '</s>', expected a token id, a list of token ids, or null"),
        ("eos_token_id", [1, -1], r"eos_token_id is \[1, -1\], expected a token id"),
        ("bos_token_id", True, "bos_token_id is True, expected a token id"),
        ("scoring_func", "softmax", "scoring_func is 'softmax'; supported: sigmoid"),
        ("topk_method", "greedy", "topk_method is 'greedy'; supported: noaux_tc"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'; supported: silu"),
        ("dtype", 16, "dtype is 16, expected text"),
        ("moe_layer_freq", 2, r"moe_layer_freq is 2: dense and .* not supported. Serve another model\.$"),
        ("moe_layer_freq", [0, 1, 1], r"moe_layer_freq is \[0, 1, 1\]: .* Serve another model\.$"),
        ("n_group", 3, "n_routed_experts 16 is not divisible by n_group 3. Correct it, or take"),
        ("topk_group", 5, "topk_group 5 is above n_group 4"),
        ("n_group", 16, "n_group 16 leaves one expert per group, but a group is scored by its best two"),
        ("num_experts_per_tok", 9, "num_experts_per_tok 9 is above the 8 experts of 2 groups"),
        ("first_k_dense_replace", 4, "first_k_dense_replace 4 is above num_hidden_layers 3"),
        ("qk_rope_head_dim", 15, "qk_rope_head_dim 15 is odd and leaves half a pair"),
        (
            "mlp_layer_types",
            ["sparse", "dense", "sparse"],
            "mlp_layer_types is .* expected 3 entries, all 'dense'",
        ),
        ("mlp_layer_types", ["dense", "sparse"], "mlp_layer_types is .* expected 3 entries, all 'dense'"),
        ("mlp_layer_types", "dense", "mlp_layer_types is 'dense', expected 3 entries"),
        ("mlp_layer_types", ["dense"] * 3, "first_k_dense_replace is 1, expected 3, the number of 'dense'"),
        ("quantization_config", "fp8", "quantization_config is 'fp8', expected an object or null"),
        ("quantization_config", {"quant_method": 8}, "quantization_config: quant_method is 8, expected text"),
        ("rope_parameters", "yarn", "rope_parameters is 'yarn', expected an object or null"),
        (
            "rope_scaling",
            {"type": "yarn"},
            "rope_parameters and rope_scaling differ. Keep the one that is right",
        ),
    ],
)
def test_wrong_values_are_refused(key: str, value: object, words: str):
    with pytest.raises(ConfigError, match=words):
        read(HF5, **{key: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"type": "llama3"}, "rope_scaling: type is 'llama3'; supported: default, yarn"),
        ({"rope_type": "default"}, "rope_scaling: rope_type and type differ. Keep the one that is right"),
        ({"type": ["yarn"]}, r"rope_scaling: type is \['yarn'\]; supported: default, yarn"),
        ({"factor": 0.5}, "the rope factor 0.5 is below 1"),
        ({"factor": "8"}, "rope_scaling: factor is '8', expected a finite number above 0"),
        ({"beta_fast": 1, "beta_slow": 1.5}, "beta_fast 1.0 is below beta_slow 1.5"),
        ({"rope_theta": 1}, "rope_theta 1.0 is not above 1"),
        ({"mscale": -1.0}, "mscale is -1.0, expected a finite number above 0"),
        ({"attention_factor": 1.2}, r"attention_factor 1.2 is not supported. Serve another model\.$"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"truncate": False}, "truncate False is not supported"),
    ],
)
def test_wrong_rope_values_are_refused(changes: dict[str, object], words: str):
    with pytest.raises(ConfigError, match=words):
        read(LEGACY, rope_scaling={**YARN, **changes})


def test_the_ends_of_a_yarn_ramp_may_be_equal():
    rope = read(LEGACY, rope_scaling={**YARN, "beta_fast": 1.0, "beta_slow": 1.0}).rope
    assert (rope.beta_fast, rope.beta_slow) == (1.0, 1.0)


def test_a_dtype_is_needed_only_where_none_is_asked_for():
    half, none = read(HF5, dtype="float16"), read(LEGACY, torch_dtype=None)
    assert [serving_dtype(cfg, "bfloat16") for cfg in (half, none)] == ["bfloat16"] * 2
    assert serving_dtype(read(HF5), "auto") == "float32"
    with pytest.raises(ConfigError, match=r"config.json says dtype 'float16', and models are served in float32 or bf"):
        serving_dtype(half, "auto")
    with pytest.raises(ConfigError, match=r"config.json names no dtype, .* Ask for one of them with dtype\.$"):
        serving_dtype(none, "auto")


def test_quantised_weights_are_refused_where_they_are_opened_and_not_where_sizes_are_read():
    for scheme, words in (({"quant_method": "fp8"}, "says fp8"), ({"quant_method": None}, "says no quant_method")):
        cfg = read(HF5, quantization_config=scheme)
        assert cfg.hidden_size == 64
        with pytest.raises(ConfigError, match=f"{words}, and FP8 .* `splash plan`.* Convert the weights to bfloat16"):
            refuse_quantised(cfg, Path("folder"))
    refuse_quantised(read(HF5), Path("folder"))


EXTRA = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "torch_dtype": "float32"}
EXTRA |= {
    "original_max_position_embeddings": 128,
    "rope_theta": 20000,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
ROPE = {**YARN, "rope_type": "yarn", "rope_theta": 50000}
ROPE |= {"attention_factor": None, "partial_rotary_factor": 1.0, "truncate": True}
EVERY = HF5 | EXTRA | {"rope_parameters": ROPE, "rope_scaling": ROPE, "quantization_config": {"quant_method": "fp8"}}


def outcome(config: dict[str, object]) -> object:
    try:
        return ModelConfig.from_dict(config, "config.json")
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("key", sorted(EVERY.keys() - {"q_lora_rank"}))
def test_a_null_is_as_good_as_no_key(key: str):
    for base in (EVERY, LEGACY, HF5):
        assert outcome({**base, key: None}) == outcome({k: v for k, v in base.items() if k != key})


@pytest.mark.parametrize("outer", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key", sorted(ROPE))
def test_a_null_in_the_rope_is_as_good_as_no_key(key: str, outer: str):
    for more in ({}, {"original_max_position_embeddings": None, "rope_theta": None}):
        base = {k: v for k, v in EVERY.items() if k not in ("rope_parameters", "rope_scaling")} | more
        null, absent = ({**ROPE, key: None}, {k: v for k, v in ROPE.items() if k != key})
        assert outcome({**base, outer: null}) == outcome({**base, outer: absent})
    both = {**EVERY, "rope_parameters": absent, "rope_scaling": absent}
    assert outcome({**EVERY, "rope_parameters": null, "rope_scaling": absent}) == outcome(both)


def test_a_null_does_not_hide_the_context_before_the_extension():
    cfg = read(LEGACY, original_max_position_embeddings=None)
    assert (cfg.rope.original_max_position, cfg.max_position_embeddings) == (64, 512)


def test_the_tests_of_nulls_know_every_key():
    source = Path(config_module.__file__).read_text(encoding="utf-8")
    asked = re.findall(r'\bf\.(?:values\.get|integer|number|boolean|one_of|token_ids|text|part)\(\s*"(\w+)"', source)
    assert len(asked) > 30 and set(asked) <= EVERY.keys()
    asked = re.findall(r'\br\.(?:values\.get|integer|number|boolean|one_of|text)\(\s*"(\w+)"', source)
    assert len(asked) > 5 and set(asked) <= ROPE.keys()


def test_a_null_query_rank_is_no_low_rank_and_none_at_all_is_refused():
    assert read(HF5, q_lora_rank=None).q_lora_rank is None
    with pytest.raises(
        ConfigError, match=r"'q_lora_rank' is missing\. .* A null says that queries have no low rank\.$"
    ):
        ModelConfig.from_dict({k: v for k, v in HF5.items() if k != "q_lora_rank"}, "config.json")


def write(path: Path, config: dict[str, object], generation: object = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_end_tokens_of_the_generation_config_are_added_once(tmp_path: Path):
    assert read_model_config(write(tmp_path, HF5)) == read(HF5)
    both = read_model_config(write(tmp_path, HF5, {"eos_token_id": [9, 1]}))
    assert both == read(HF5, eos_token_id=[1, 9])


def test_nulls_of_a_generation_config_count_as_missing(tmp_path: Path):
    assert read_model_config(write(tmp_path, HF5, {"eos_token_id": None, "bos_token_id": None})) == read(HF5)


def test_a_bad_generation_config_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id is 'x'"):
        read_model_config(write(tmp_path, HF5, {"eos_token_id": "x"}))
    with pytest.raises(CheckpointError, match=r"generation_config.json: expected a JSON object, found list"):
        read_model_config(write(tmp_path, HF5, [1]))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", r"the file is empty \(0 bytes\), expected JSON. Download or copy it again"),
        (b'{"a": 1', r"not valid JSON \(7 bytes; .* line 1 column 8.*\). Correct it, or copy it again"),
        (b'{"a": "\xff"}', r"not valid JSON \(10 bytes"),
        (b"[]", "expected a JSON object, found list"),
        (
            b"version https://git-lfs.github.com/spec/v1\nsize 77\n",
            "51 bytes, expected 77: it is a git-LFS pointer",
        ),
    ],
)
def test_a_damaged_config_file_is_named(tmp_path: Path, content: bytes, words: str):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"config.json: {words}"):
        read_model_config(tmp_path)


def test_an_absent_config_file_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"there is no config.json in it. Give the folder that holds it"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype", "rope"),
    [
        ("ds3_base", "float32", "default"),
        ("ds3_yarn_mtp", "float32", "yarn"),
        ("ds3_bf16_sharded", "bfloat16", "default"),
    ],
)
def test_oracle_configs_are_read(oracles: Path, name: str, dtype: str, rope: str):
    cfg = read_model_config(oracles / name)
    assert (cfg.dtype, cfg.rope.type, cfg.num_layers) == (dtype, rope, 3)
    assert cfg.num_nextn_predict_layers == (1 if name == "ds3_yarn_mtp" else 0)


def test_what_is_no_checkpoint_folder_says_what_to_give(tmp_path: Path):
    with pytest.raises(
        CheckpointError, match=r"checkpoint org/name does not exist. Give the folder .* nothing is download"
    ):
        read_model_config(Path("org/name"))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"checkpoint .*file is a file\. Give the folder that holds config\.json"):
        read_model_config(tmp_path / "file")
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    write(snapshot, HF5)
    with pytest.raises(
        CheckpointError, match=r"there is no config.json in it. It is a hub's cache: give .*snapshots/abc\."
    ):
        read_model_config(tmp_path / "models--org--name")
    assert read_model_config(snapshot) == read(HF5)
