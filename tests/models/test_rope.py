"""Rotary frequencies and long-context scales against plain formulas and known numbers (scenario S07)."""

import math

import numpy as np
import pytest

from splash_jax.models.config import ModelConfig, softmax_scale
from splash_jax.models.rope import RopeConfig, inv_freq, rope_attention_factor, yarn_scale

SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "v_head_dim"),
    *("intermediate_size", "max_position_embeddings", "rms_norm_eps"),
)
DENSE = dict.fromkeys(SIZES, 8) | {
    "model_type": "deepseek_v3",
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "rope_theta": 10000,
    "torch_dtype": "float32",
}
PLAIN = ModelConfig.from_dict(DENSE, "config.json")


def model(*, rope_theta: float = 10000, **yarn: float | None) -> ModelConfig:
    """A model extended 40 times from 4096 positions, as DeepSeek-V3 is."""
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, **yarn}
    return ModelConfig.from_dict({**DENSE, "rope_theta": rope_theta, "rope_scaling": scaling}, "config.json")


D = 40**-0.5  # nope 24 + rope 16


@pytest.mark.parametrize(("mscale_all_dim", "times"), [(1.0, 1.8739), (0.707, 1.5896), (None, 1.0), (0, 1.0)])
def test_softmax_scale_grows_with_the_all_dim_factor_only(mscale_all_dim: float | None, times: float):
    for mscale in (None, 1.0, 0.5):
        cfg = model(mscale=mscale, mscale_all_dim=mscale_all_dim)
        assert softmax_scale(cfg) / D == pytest.approx(times, abs=5e-5)


def test_no_extension_changes_nothing():
    assert softmax_scale(PLAIN) == D
    assert rope_attention_factor(PLAIN.rope) == 1.0
    one = model(factor=1, mscale=1.0, mscale_all_dim=1.0)
    assert (softmax_scale(one), rope_attention_factor(one.rope)) == (D, 1.0)


def m(k: float) -> float:
    return 0.1 * k * math.log(40) + 1


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "factor"),
    [
        (1.0, 1.0, 1.0),
        (0.707, 0.707, 1.0),
        (1.0, 0.707, m(1.0) / m(0.707)),
        (0.5, 1.0, m(0.5) / m(1.0)),
        (None, None, m(1.0)),
        (0.5, None, m(1.0)),
        (None, 0.707, m(1.0)),
        (0.5, 0, m(1.0)),
    ],
)
def test_cos_and_sin_get_the_ratio_of_the_two_factors(mscale, mscale_all_dim, factor):
    rope = model(mscale=mscale, mscale_all_dim=mscale_all_dim).rope
    assert rope_attention_factor(rope) == pytest.approx(factor, rel=1e-12)


def test_yarn_scale():
    assert yarn_scale(model().rope, 1.0) == pytest.approx(1.368888, abs=1e-6)


def test_default_frequencies():
    freq = inv_freq(PLAIN.rope, 16)
    assert (freq.shape, freq.dtype) == ((8,), np.float64)
    np.testing.assert_allclose(freq, [10000.0 ** (-i / 8) for i in range(8)], rtol=1e-14)


def reference(rope: RopeConfig, dim: int) -> list[float]:
    """The yarn paper's ramp, pair by pair."""
    freqs = []
    turns_at = [rope.original_max_position / (2 * math.pi) / n for n in (rope.beta_fast, rope.beta_slow)]
    low, high = (dim / 2 * math.log(x) / math.log(rope.theta) for x in turns_at)
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    for i in range(dim // 2):
        freq = rope.theta ** (-2 * i / dim)
        if i <= low:
            freqs.append(freq)
        elif i >= high:
            freqs.append(freq / rope.factor)
        else:
            slow = (i - low) / (high - low)
            freqs.append(freq / rope.factor * slow + freq * (1 - slow))
    return freqs


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("changes", [{}, {"factor": 8, "original_max_position_embeddings": 64}, {"beta_fast": 16}])
def test_yarn_frequencies(dim: int, changes: dict[str, float]):
    rope = model(**changes).rope
    np.testing.assert_allclose(inv_freq(rope, dim), reference(rope, dim), rtol=1e-13)


def test_deepseek_v3_ramps_from_pair_10_to_pair_23():
    rope = model(beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0).rope
    ratio = inv_freq(rope, 64) / inv_freq(PLAIN.rope, 64)
    np.testing.assert_allclose(ratio[:11], 1.0, rtol=1e-14)
    np.testing.assert_allclose(ratio[23:], 1 / 40, rtol=1e-13)
    np.testing.assert_allclose(ratio[16], 1 - 6 / 13 + 6 / 13 / 40, rtol=1e-13)


@pytest.mark.parametrize(
    ("context", "theta", "pair"), [(4096, 50000, 19.16), (4096, 10000, 22.51), (512, 10000, 15.28)]
)
def test_a_ramp_between_equal_turns_is_the_one_pair_around_them(context: int, theta: float, pair: float):
    """Kimi-K2's rope has beta_fast = beta_slow = 1: floor and ceil of one place leave its two neighbours."""
    rope = model(
        rope_theta=theta, factor=32, original_max_position_embeddings=context, beta_fast=1.0, beta_slow=1.0
    ).rope
    place = 32 * math.log(context / (2 * math.pi)) / math.log(theta)  # the pair that turns once over the context
    assert place == pytest.approx(pair, abs=0.01)
    plain = [theta ** (-i / 32) for i in range(32)]
    wanted = [freq if i <= place else freq / 32 for i, freq in enumerate(plain)]
    np.testing.assert_allclose(inv_freq(rope, 64), wanted, rtol=1e-13)


def test_a_ramp_without_width_is_a_step():
    # At theta 1e9 both ends of the ramp fall on pair 0 for a tiny original context.
    rope = model(rope_theta=1e9, factor=8, original_max_position_embeddings=6, beta_fast=1.0, beta_slow=0.96).rope
    ratio = inv_freq(rope, 16) * 1e9 ** (np.arange(8) / 8)
    np.testing.assert_allclose(ratio, [1.0] + [1 / 8] * 7, rtol=1e-12)
