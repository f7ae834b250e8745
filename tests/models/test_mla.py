"""Attention's projections against unabsorbed float64: the score scale (S07), rotary pairing (S08), biases, outputs."""

import math
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from splash_jax.errors import ConfigError
from splash_jax.models import mla
from splash_jax.models.config import ModelConfig
from splash_jax.models.deepseek_v3_weights import model_leaves
from splash_jax.models.params import Leaf
from splash_jax.models.rope import inv_freq
from tests.support import SMALL

SIZES = {
    "hidden_size": 12,
    "num_attention_heads": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 6,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 3,
}
POSITIONS = np.asarray([0, 1, 7, 63], np.int32)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40, "original_max_position_embeddings": 64}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(SMALL | SIZES | changes, "mla test")


class File(dict):
    """Tensors by their names in a checkpoint, without the layer's prefix."""

    def read(self, name: str, index: Any = ...) -> np.ndarray:
        return self[name.removeprefix("model.layers.0.self_attn.")][index]

    def rank(self, cfg: ModelConfig, ranks: int = 1, rank: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """(attn, moved) of a rank, as the engine would load them where heads are split."""

        def block(leaf: Leaf) -> np.ndarray:
            cut = {"heads": lambda n: slice(rank * n // ranks, (rank + 1) * n // ranks)}
            whole = lambda n: slice(0, n)  # noqa: E731
            return leaf.read(self, tuple(cut.get(d, whole)(n) for d, n in zip(leaf.dims, leaf.shape, strict=True)))

        layer = model_leaves(cfg, 1)["layers"][0]
        return tuple({n: block(leaf) for n, leaf in layer[part].items()} for part in ("attn", "moved"))


def make_file(cfg: ModelConfig) -> File:
    """Numbers with spread; norms far from one."""
    rng, layer, file = np.random.default_rng(0), model_leaves(cfg, 1)["layers"][0], File()
    for leaf in (*layer["attn"].values(), *layer["moved"].values()):
        for name, shape in leaf.sources.items():
            value = rng.uniform(0.5, 1.5, shape) if "norm" in name else rng.normal(0, 0.6, shape)
            file[name.removeprefix("model.layers.0.self_attn.")] = value.astype(np.float32)
    return file


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def rotate(cfg: ModelConfig, x: np.ndarray, positions: np.ndarray, factor: float) -> np.ndarray:
    """Each pair (a, b) as the complex number a + ib, turned by its angle; pairs adjacent or in halves."""
    pairs = x.reshape(*x.shape[:-1], -1, 2) if cfg.rope.interleave else np.stack(np.split(x, 2, -1), -1)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * factor * np.exp(1j * positions[..., None] * inv_freq(cfg.rope, 4))
    return np.concatenate([turned.real, turned.imag], -1)


def scores_float64(
    cfg: ModelConfig, file: File, xq: np.ndarray, at_q: np.ndarray, xk: np.ndarray, at_k: np.ndarray,
    scale: float = 1.0, factor: float = 1.0,
) -> np.ndarray:  # fmt: skip
    """Scores f64[H, Q, K] by whole keys per head, times d^-1/2 and `scale`."""
    f = {name.split(".")[0] + "." * name.endswith("bias"): w.astype(np.float64) for name, w in file.items()}
    n, H, c = cfg.qk_nope_head_dim, cfg.num_heads, cfg.kv_lora_rank
    q = xq.astype(np.float64)
    if cfg.q_lora_rank is None:
        q = q @ f["q_proj"].T
    else:
        q = norm(q @ f["q_a_proj"].T + f.get("q_a_proj.", 0), f["q_a_layernorm"]) @ f["q_b_proj"].T
    q = q.reshape(len(xq), H, -1)
    row = xk.astype(np.float64) @ f["kv_a_proj_with_mqa"].T + f.get("kv_a_proj_with_mqa.", 0)
    k_nope = np.einsum("kc,hnc->khn", norm(row[:, :c], f["kv_a_layernorm"]), f["kv_b_proj"].reshape(H, -1, c)[:, :n])
    q_rope = rotate(cfg, q[..., n:], at_q[:, None] * np.ones(H), factor)
    k_rope = rotate(cfg, row[:, c:], at_k, factor)
    scores = np.einsum("qhn,khn->hqk", q[..., :n], k_nope) + np.einsum("qhp,kp->hqk", q_rope, k_rope)
    return scores * (n + cfg.qk_rope_head_dim) ** -0.5 * scale


def scores(cfg: ModelConfig, file: File, xq: Any, at_q: Any, xk: Any, at_k: Any) -> np.ndarray:
    attn, moved = file.rank(cfg)
    q = jax.jit(partial(absorbed_queries, cfg))(attn, moved, xq, at_q)
    k = jax.jit(partial(mla.latents, cfg))(attn, xk, at_k)
    assert q.shape == (len(xq), cfg.num_heads, mla.latent_width(cfg)) and k.shape == (len(xk), mla.latent_width(cfg))
    return np.einsum("qhd,kd->hqk", np.asarray(q, np.float64), np.asarray(k, np.float64))


def absorbed_queries(cfg: ModelConfig, attn: Any, moved: Any, x: Any, at: Any) -> jax.Array:
    return mla.absorb(moved, mla.queries(cfg, attn, moved, x, at))


def rows(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(4, 12)).astype(np.float32)


def m(k: float) -> float:
    return 0.1 * k * math.log(40) + 1


def yarn(**factors: float) -> dict[str, Any]:
    return {"rope_parameters": YARN | factors}


LONG = [
    pytest.param({}, 1.0, 1.0, id="no extension"),
    pytest.param(yarn(mscale=1.0, mscale_all_dim=1.0), 1.8739, 1.0, id="all-dim 1"),
    pytest.param(yarn(mscale=0.707, mscale_all_dim=0.707), 1.5896, 1.0, id="all-dim 0.707"),
    pytest.param(yarn(mscale=1.0, mscale_all_dim=0.707), m(0.707) ** 2, m(1) / m(0.707), id="unequal"),
    pytest.param(yarn(), 1.0, m(1.0), id="absent"),
]  # fmt: skip


@pytest.mark.parametrize(("rope", "scale", "factor"), LONG)
def test_the_score_scale_of_long_contexts(rope, scale, factor):
    """Positions 0, 1, 7 and 63 against each other: at position 0 alone the rotary factor's angle would not show."""
    cfg = config(**rope)
    file = make_file(cfg)
    got = scores(cfg, file, rows(1), POSITIONS, rows(2), POSITIONS)
    want = scores_float64(cfg, file, rows(1), POSITIONS, rows(2), POSITIONS, scale, factor)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * np.abs(want).max())
    off = scores_float64(cfg, file, rows(1), POSITIONS, rows(2), POSITIONS + 1, scale, factor)
    assert np.abs(off - want).max() > 1e-2 * np.abs(want).max()  # a key one position off would show


@pytest.mark.parametrize("interleave", [True, False])
def test_each_pairing_is_its_own(interleave):
    """Query at 5 and key at 2: only unequal positions tell the pairings apart."""
    cfg, other = config(rope_interleave=interleave), config(rope_interleave=not interleave)
    file = make_file(cfg)
    five, two = np.full(4, 5, np.int32), np.full(4, 2, np.int32)
    args = file, rows(1), five, rows(2), two
    got, want, wrong = scores(cfg, *args), scores_float64(cfg, *args), scores_float64(other, *args)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * np.abs(want).max())
    assert np.abs(got - wrong).max() > 0.05 * np.abs(want).max()
    same = file, rows(1), five, rows(2), five
    np.testing.assert_allclose(
        scores_float64(cfg, *same), scores_float64(other, *same), rtol=1e-9
    )  # the two agree here, so a test at equal positions proves nothing


def test_weights_permuted_at_load_time_want_the_other_flag():
    """Adjacent pairs reordered to halves, served with halves, score the same: the two must never be combined."""
    adjacent, halves = config(rope_interleave=True), config(rope_interleave=False)
    file = make_file(adjacent)
    n, c, order = adjacent.qk_nope_head_dim, adjacent.kv_lora_rank, [0, 2, 1, 3]
    q_b, kv_a = file["q_b_proj.weight"].reshape(2, -1, 6).copy(), file["kv_a_proj_with_mqa.weight"].copy()
    q_b[:, n:] = q_b[:, n:][:, order]
    kv_a[c:] = kv_a[c:][order]
    permuted = File(file | {"q_b_proj.weight": q_b.reshape(-1, 6), "kv_a_proj_with_mqa.weight": kv_a})
    rest = rows(1), POSITIONS, rows(2), POSITIONS[::-1].copy()
    want = scores(adjacent, file, *rest)
    np.testing.assert_allclose(scores(halves, permuted, *rest), want, atol=1e-5 * np.abs(want).max())
    assert np.abs(scores(adjacent, permuted, *rest) - want).max() > 0.05 * np.abs(want).max()


def test_a_pairing_that_is_no_flag_is_refused():
    with pytest.raises(ConfigError, match="rope_interleave is 'halves', expected true or false"):
        config(rope_interleave="halves")


@pytest.mark.parametrize(
    "changes", [{"attention_bias": True}, {"q_lora_rank": None}, {"q_lora_rank": None, "attention_bias": True}], ids=str
)
def test_variants(changes):
    cfg = config(**changes)
    args = make_file(cfg), rows(1), POSITIONS, rows(2), POSITIONS
    want = scores_float64(cfg, *args)
    np.testing.assert_allclose(scores(cfg, *args), want, rtol=1e-4, atol=2e-5 * np.abs(want).max())


def test_scores_depend_on_distance_only():
    cfg = config()
    file = make_file(cfg)
    at = lambda q, k: scores(cfg, file, rows(1), POSITIONS + np.int32(q), rows(2), POSITIONS + np.int32(k))  # noqa: E731
    np.testing.assert_allclose(at(3, 1), at(103, 101), atol=1e-4)


def test_outputs_split_by_head_sum_to_the_whole():
    """Values are read off the latent: per-head float64, whole and as the sum over two ranks of one head each."""
    cfg = config()
    file = make_file(cfg)
    out = np.random.default_rng(3).normal(size=(4, 2, 8)).astype(np.float32)
    w_uv = file["kv_b_proj.weight"].reshape(2, -1, 8)[:, cfg.qk_nope_head_dim :].astype(np.float64)
    want = np.einsum("nhc,hvc->nhv", out.astype(np.float64), w_uv).reshape(4, 6) @ file["o_proj.weight"].T
    outputs = jax.jit(lambda moved, out: mla.outputs(moved, mla.values(moved, out)))
    np.testing.assert_allclose(outputs(file.rank(cfg)[1], out), want, atol=1e-5)
    total = sum(np.asarray(outputs(file.rank(cfg, 2, h)[1], out[:, h : h + 1])) for h in range(2))
    np.testing.assert_allclose(total, want, atol=1e-5)


def test_leading_dimensions_are_kept_and_padding_is_finite():
    cfg = config()
    attn, moved = make_file(cfg).rank(cfg)
    x, at = rows(1).reshape(2, 2, 12), np.asarray([[-1, 3], [0, -1]], np.int32)
    q = jax.jit(partial(absorbed_queries, cfg))(attn, moved, x, at)
    k = jax.jit(partial(mla.latents, cfg))(attn, x, at)
    assert q.shape == (2, 2, 2, 12) and k.shape == (2, 2, 12)
    assert np.isfinite(np.asarray(q)).all() and np.isfinite(np.asarray(k)).all()
