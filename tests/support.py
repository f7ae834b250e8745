"""What several tests need: the small fixture of the scenarios, engines that compile only what they use, poison."""

from itertools import permutations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from splash_jax import LLM, RequestOutput
from splash_jax.layouts import ROLES
from splash_jax.models.random_checkpoint import write_random_checkpoint

LAYOUTS = tuple(ROLES)
DIRECTIONS = list(permutations(LAYOUTS, 2))

# An engine's programs take long to compile: by default its tests run in the layouts of the paper, else in all.
USUAL = LAYOUTS[:4]
EACH_DIRECTION = [pytest.param(*pair, marks=() if set(pair) <= set(USUAL) else pytest.mark.slow) for pair in DIRECTIONS]
EACH_LAYOUT = [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in LAYOUTS]

# Layouts of two axes: every role on either axis, owners and positions side by side, outside each other and alone.
MESHES = {"2x2": {"node": 2, "chip": 2}, "2x4": {"node": 2, "chip": 4}}
HYBRIDS = (
    "node=dop,chip=cp",
    "node=dp,chip=tp",
    "node=tp,chip=dp",
    "node=cp,chip=dcp",
    "node=rep,chip=dop",
    "node=dcp,chip=rep",
)
HYBRID_DIRECTIONS = list(permutations(HYBRIDS, 2))

SMALL: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "dtype": "float32",
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 2,
    "v_head_dim": 16,
    "vocab_size": 512,
}


def write_checkpoint(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random checkpoint of the small fixture, with some of its settings changed."""
    return write_random_checkpoint(folder, SMALL | changes, seed)


def make_llm(model: Path, **settings: Any) -> LLM:
    """An engine for a test: float32, small pages, programs compiled when first used."""
    defaults: dict[str, Any] = {
        "num_devices": 4,
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_model_len": 256,
        "block_size": 4,
        "max_num_batched_tokens": 64,
        "decode_buckets": (8,),
        "compile_ahead": False,
        "skip_tokenizer_init": True,
        "compilation_cache_dir": None,
        "debug_checks": True,
    }
    return LLM(model, **(defaults | settings))


def poison_free_pages(llm: LLM) -> None:
    """Fill every page that no request holds with NaN: whoever reads one shows it."""
    pool, state = llm.engine.pool, llm.engine.state
    held = np.zeros((pool.layout.size, pool.pages_per_rank), bool)
    for request in pool.manifest().requests.values():
        for rank, pages in request.pages.items():
            held[rank, list(pages)] = True
    for i, array in enumerate(state.pools):
        values = np.array(array)
        values[~held] = np.nan
        state.pools[i] = jax.device_put(jnp.asarray(values), array.sharding)


def max_logprob_difference(a: RequestOutput, b: RequestOutput) -> float:
    """Largest difference of the drawn tokens' log-probabilities; the token ids must be equal."""
    worst = 0.0
    for x, y in zip(a.outputs, b.outputs, strict=True):
        assert x.token_ids == y.token_ids
        assert x.logprobs is not None and y.logprobs is not None
        for token, p, q in zip(x.token_ids, x.logprobs, y.logprobs, strict=True):
            worst = max(worst, abs(p[token].logprob - q[token].logprob))
    return worst


def assert_all_free(llm: LLM) -> None:
    """No page is held, nothing runs and nothing waits."""
    engine = llm.engine
    engine.pool.check(live=())
    assert engine.pool.free_pages() == [engine.pool.pages_per_rank] * engine.pool.layout.size
    assert not engine.scheduler.running and not engine.scheduler.waiting
