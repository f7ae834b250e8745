"""The config of a published FP8 checkpoint, as it is, answers every question that no weights are needed for."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from splash_jax.cli.main import app
from splash_jax.cost import load_hardware
from splash_jax.errors import ConfigError
from splash_jax.preflight.case import draw_case, read_model

V3 = {
    "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "topk_group": 4, "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
KIMI = V3 | {
    "model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_routed_experts": 384,
    "num_attention_heads": 64, "max_position_embeddings": 131072, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827, "vocab_size": 163840,
    "rope_scaling": V3["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
}  # fmt: skip


@pytest.fixture
def published(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(V3))
    return tmp_path


def answer(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_its_prices_are_those_of_the_model_by_name(published: Path, tmp_path: Path) -> None:
    found = []
    for model in (str(published), "deepseek-v3.2"):
        target = tmp_path / "out.json"
        answer("plan", model, "--hardware", "h200", "-T", "8", "--dtype", "float8", "--json", str(target))
        found.append({k: v for k, v in json.loads(target.read_text()).items() if k != "model"})
    assert found[0] == found[1]


def test_its_simulation_is_that_of_the_model_by_name(published: Path, tmp_path: Path) -> None:
    found = []
    for model in (str(published), "deepseek-v3.2"):
        target = tmp_path / "out.csv"
        more = ["--traffic", "rollout", "--requests", "2", "--ways", "tp", "--csv", str(target)]
        answer("simulate", model, "--dtype", "float8", *more)
        found.append(target.read_text())
    assert found[0] == found[1]


def test_its_bytes_are_shown_without_hardware(published: Path) -> None:
    sizes = ["--device-memory-bytes", "400G", "--max-model-len", "4096"]
    assert "8 ranks, bfloat16" in answer("plan", str(published), "-T", "8", "--src", "tp", "--dst", "dp", *sizes)


@pytest.mark.parametrize(("config", "layers"), [(V3, 61), (KIMI, 61)])
def test_a_case_of_it_is_drawn(tmp_path: Path, config: dict, layers: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    case = draw_case(
        str(tmp_path), load_hardware("h200"), num_devices=8, layouts=("dp", "cp"), batch=16, context=4096,
        prefill_tokens=8192, block_size=64, memory_fraction=0.9,
    )  # fmt: skip
    assert (case.model.num_layers, case.model.quantization, case.shapes.dtype) == (layers, "fp8", "bfloat16")


def test_a_dtype_that_is_not_served_matters_only_where_none_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3 | {"torch_dtype": "float16"}))
    assert read_model(str(tmp_path)).dtype == "float16"
    answer("plan", str(tmp_path), "--hardware", "h200", "-T", "8", "--dtype", "float8")
    done = CliRunner().invoke(app, ["plan", str(tmp_path), "--hardware", "h200", "-T", "8"])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(
        "config.json says dtype 'float16', and models are served in float32 or bfloat"
    )
