"""Multi-head latent attention. A token's history is one row [latent | rotary key] of width c + p, shared by all heads.

Absorbed, queries meet the latent itself and values are read off it; expanded, `w_uk` and `w_uv` make keys of n and
values of v columns of it for every head. Queries and outputs are here in either form.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from splash_jax.models.config import ModelConfig, softmax_scale
from splash_jax.models.math import add_bias, dot, dot_heads, rms_norm
from splash_jax.models.rope import inv_freq, rope_attention_factor

LORA_NORM_EPS = 1e-6  # of q_a and kv_a norms, whatever rms_norm_eps says

Weights = Mapping[str, jax.Array]


def latent_width(cfg: ModelConfig) -> int:
    """Numbers stored per token and layer."""
    return cfg.kv_lora_rank + cfg.qk_rope_head_dim


def queries(cfg: ModelConfig, attn: Weights, moved: Weights, x: jax.Array, positions: jax.Array) -> jax.Array:
    """[..., d] at positions i32[...] to scaled queries of the heads' own width, [..., heads here, n + p]."""
    if cfg.q_lora_rank is not None:
        latent = add_bias(dot(x, attn["q_a"]), attn.get("q_a_bias"))
        x = rms_norm(latent, attn["q_a_norm"], LORA_NORM_EPS)
    n, p = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
    q = dot(x, moved["q_b"]).reshape(*x.shape[:-1], -1, n + p)
    rotary = rotate(cfg, q[..., n:], jnp.expand_dims(positions, -1))
    return jnp.concatenate([q[..., :n], rotary], -1) * jnp.asarray(softmax_scale(cfg), x.dtype)


def absorb(moved: Weights, q: jax.Array) -> jax.Array:
    """Queries [..., heads here, n + p] to those that meet latents, [..., heads here, c + p]."""
    n = moved["w_uk"].shape[-1]
    return jnp.concatenate([dot_heads(q[..., :n], moved["w_uk"]), q[..., n:]], -1)


def latents(cfg: ModelConfig, attn: Weights, x: jax.Array, positions: jax.Array) -> jax.Array:
    """[..., d] at positions i32[...] to the rows of history [..., c + p]. Only the latent is normed."""
    row = add_bias(dot(x, attn["kv_a"]), attn.get("kv_a_bias"))
    c = cfg.kv_lora_rank
    latent = rms_norm(row[..., :c], attn["kv_a_norm"], LORA_NORM_EPS)
    return jnp.concatenate([latent, rotate(cfg, row[..., c:], positions)], -1)


def values(moved: Weights, out: jax.Array) -> jax.Array:
    """Attention over latents [..., heads here, c] to the heads' own values [..., heads here, v]."""
    return dot_heads(out, moved["w_uv"])


def outputs(moved: Weights, out: jax.Array) -> jax.Array:
    """Values [..., heads here, v] to [..., d], partial where heads are split; no bias."""
    return dot(out.reshape(*out.shape[:-2], -1), moved["o"])


def rotate(cfg: ModelConfig, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding of the last dimension, pairs adjacent or in halves as the config says. positions: x.shape[:-1]
    up to broadcasting. Computed in float32. A padding row at -1 gets finite numbers nobody reads.
    """
    freq = jnp.asarray(np.asarray(inv_freq(cfg.rope, cfg.qk_rope_head_dim), np.float32))
    angle = positions.astype(jnp.float32)[..., None] * jnp.expand_dims(freq, range(positions.ndim))
    factor = rope_attention_factor(cfg.rope)
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    h = x.astype(jnp.float32)
    if cfg.rope.interleave:
        a, b = h[..., 0::2], h[..., 1::2]
    else:
        a, b = jnp.split(h, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
