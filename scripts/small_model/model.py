"""DeepSeek-V3 (multi-head latent attention, mixture of experts) in flax.nnx, as transformers computes it.

Axis names in docstrings: B batch, T positions, N = B * T, D hidden, H heads, E routed experts.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

ATTENTION_BLOCK = 256
TRAIN_CAPACITY = 2.0  # slots per expert in training, relative to even routing


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of the model, with the field names of a DeepSeek-V3 config.json."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 384
    moe_intermediate_size: int = 112
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 24
    qk_rope_head_dim: int = 16
    v_head_dim: int = 24
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    n_group: int = 4
    topk_group: int = 2
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    yarn_factor: float = 4.0
    yarn_original_positions: int = 512
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float = 1.0

    @property
    def softmax_scale(self) -> float:
        """Attention scale with YaRN's correction (mscale equals mscale_all_dim)."""
        mscale = 0.1 * self.yarn_mscale * math.log(self.yarn_factor) + 1.0
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * mscale * mscale


def yarn_frequencies(config: ModelConfig) -> jax.Array:
    """Rotary frequencies f32[qk_rope_head_dim / 2] under YaRN."""
    dim, base = config.qk_rope_head_dim, config.rope_theta

    def correction(rotations: float) -> float:
        wavelengths = config.yarn_original_positions / (rotations * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(base))

    low = max(math.floor(correction(config.yarn_beta_fast)), 0)
    high = min(math.ceil(correction(config.yarn_beta_slow)), dim - 1)
    plain = base ** -(jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    ramp = jnp.clip((jnp.arange(dim // 2, dtype=jnp.float32) - low) / (high - low), 0, 1)
    return plain / config.yarn_factor * ramp + plain * (1 - ramp)


def rotate(x: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Interleaved rotary embedding of x[B, T, H, R] at positions 0..T-1; pairs come out de-interleaved."""
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.concatenate([even * cos - odd * sin, even * sin + odd * cos], axis=-1)


def weight(rngs: nnx.Rngs, *shape: int, std: float) -> nnx.Param:
    """A normally initialised float32 parameter."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """x[..., size] -> the same shape."""
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.scale[...]


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """softmax(query key^T) value, causal: [B, T, H, K], [B, T, H, K], [B, T, H, V] -> [B, T, H, V].

    Queries go in blocks that see only the keys up to their end; the softmax's sum comes out of the same
    product as its values (an extra column of ones), which saves a pass over the scores.
    """
    batch, length, heads, _ = query.shape

    def by_head(x: jax.Array) -> jax.Array:
        return x.transpose(0, 2, 1, 3).reshape(batch * heads, length, -1)

    query, key, value = by_head(query), by_head(key), by_head(value)
    value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)
    blocks = []
    for start in range(0, length, ATTENTION_BLOCK):
        end = min(start + ATTENTION_BLOCK, length)
        scores = jax.lax.batch_matmul(query[:, start:end], key[:, :end].transpose(0, 2, 1))
        mask = jnp.arange(start, end)[:, None] >= jnp.arange(end)
        scores = jnp.where(mask, scores, -1e30)
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
        blocks.append(jax.lax.batch_matmul(weights, value[:, :end]))
    sums = jnp.concatenate(blocks, axis=1)
    mixed = sums[..., :-1] / sums[..., -1:]
    return mixed.reshape(batch, heads, length, -1).transpose(0, 2, 1, 3)


class Attention(nnx.Module):
    """Multi-head latent attention, x[N, D] -> [N, D], where N is B * T flattened."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c, heads = config, config.num_attention_heads
        key_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
        self.config = c
        self.q_a = weight(rngs, c.hidden_size, c.q_lora_rank, std=c.hidden_size**-0.5)
        self.q_a_norm = RMSNorm(c.q_lora_rank, 1e-6)
        self.q_b = weight(rngs, c.q_lora_rank, heads * key_dim, std=c.q_lora_rank**-0.5)
        self.kv_a = weight(rngs, c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, std=c.hidden_size**-0.5)
        self.kv_a_norm = RMSNorm(c.kv_lora_rank, 1e-6)
        kv_dim = c.qk_nope_head_dim + c.v_head_dim
        self.kv_b = weight(rngs, c.kv_lora_rank, heads * kv_dim, std=c.kv_lora_rank**-0.5)
        self.o = weight(rngs, heads * c.v_head_dim, c.hidden_size, std=0.0)

    def __call__(self, x: jax.Array, frequencies: jax.Array, batch: int) -> jax.Array:
        """x[N, D] of batch rows -> [N, D]."""
        c = self.config

        def heads(flat: jax.Array) -> jax.Array:
            return flat.reshape(batch, -1, c.num_attention_heads, flat.shape[-1] // c.num_attention_heads)

        q_nope, q_rope = jnp.split(
            heads(self.q_a_norm(x @ self.q_a[...]) @ self.q_b[...]), [c.qk_nope_head_dim], axis=-1
        )
        latent, k_rope = jnp.split(x @ self.kv_a[...], [c.kv_lora_rank], axis=-1)
        kv = heads(self.kv_a_norm(latent) @ self.kv_b[...])
        k_nope, value = jnp.split(kv, [c.qk_nope_head_dim], axis=-1)
        k_rope = rotate(k_rope.reshape(batch, -1, 1, c.qk_rope_head_dim), frequencies)
        query = jnp.concatenate([q_nope, rotate(q_rope, frequencies)], axis=-1) * c.softmax_scale
        key = jnp.concatenate([k_nope, jnp.broadcast_to(k_rope, q_rope.shape)], axis=-1)
        return causal_attention(query, key, value).reshape(x.shape[0], -1) @ self.o[...]


class MLP(nnx.Module):
    """SiLU-gated feed-forward layer, x[N, D] -> [N, D]."""

    def __init__(self, hidden: int, width: int, rngs: nnx.Rngs):
        self.gate = weight(rngs, hidden, width, std=hidden**-0.5)
        self.up = weight(rngs, hidden, width, std=hidden**-0.5)
        self.down = weight(rngs, width, hidden, std=0.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x[N, D] -> [N, D]."""
        return (jax.nn.silu(x @ self.gate[...]) * (x @ self.up[...])) @ self.down[...]


class MoE(nnx.Module):
    """Shared expert plus routed experts."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c, experts, width = config, config.n_routed_experts, config.moe_intermediate_size
        self.config = c
        self.router = weight(rngs, c.hidden_size, experts, std=0.02)
        self.bias = nnx.Variable(jnp.zeros(experts, jnp.float32))
        self.gate = weight(rngs, c.hidden_size, experts, width, std=c.hidden_size**-0.5)
        self.up = weight(rngs, c.hidden_size, experts, width, std=c.hidden_size**-0.5)
        self.down = weight(rngs, experts, width, c.hidden_size, std=0.0)
        self.shared = MLP(c.hidden_size, c.n_shared_experts * width, rngs)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights f32[N, E] of the experts (zero if not chosen) and tokens per expert f32[E]."""
        c = self.config
        scores = jax.nn.sigmoid(x @ self.router[...])
        biased = jax.lax.stop_gradient(scores) + self.bias[...]
        groups = biased.reshape(biased.shape[0], c.n_group, -1)
        group_scores = jax.lax.top_k(groups, 2)[0].sum(-1)
        kept = jax.nn.one_hot(jax.lax.top_k(group_scores, c.topk_group)[1], c.n_group).sum(-2) > 0
        biased = jnp.where(kept[..., None], groups, -jnp.inf).reshape(biased.shape)
        top = jax.lax.top_k(biased, c.num_experts_per_tok)[1]
        chosen = jax.nn.one_hot(top, c.n_routed_experts).sum(-2)
        weights = scores * chosen
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20) * c.routed_scaling_factor
        return weights, chosen.sum(0)

    def dense(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """Every expert on every token, weighted by the (mostly zero) weights[N, E]: exact, but slow."""
        gate = x @ self.gate[...].reshape(x.shape[1], -1)
        hidden = jax.nn.silu(gate) * (x @ self.up[...].reshape(x.shape[1], -1))
        hidden = hidden * jnp.repeat(weights, self.config.moe_intermediate_size, axis=-1)
        return hidden @ self.down[...].reshape(-1, x.shape[1])

    def dispatched(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """Each expert on its first `capacity` tokens; what goes beyond that is dropped (training only)."""
        tokens, experts = weights.shape
        capacity = int(TRAIN_CAPACITY * tokens * self.config.num_experts_per_tok / experts)
        place = jnp.cumsum(weights > 0, axis=0) - 1
        kept = (weights > 0) & (place < capacity)
        slot = jnp.where(kept, place + jnp.arange(experts) * capacity, experts * capacity)
        source = jnp.full(experts * capacity + 1, tokens).at[slot].set(jnp.arange(tokens)[:, None])[:-1]
        padded = jnp.pad(x, ((0, 1), (0, 0)))
        inputs = padded[source].reshape(experts, capacity, -1)
        share = jnp.pad(weights, ((0, 1), (0, 0)))[source.reshape(experts, -1), jnp.arange(experts)[:, None]]
        outputs = []
        for expert in range(experts):  # plain products: faster on a CPU than one batched product
            gate, up = self.gate[...][:, expert], self.up[...][:, expert]
            hidden = jax.nn.silu(inputs[expert] @ gate) * (inputs[expert] @ up)
            outputs.append((hidden * share[expert, :, None]) @ self.down[...][expert])
        return jnp.zeros_like(padded).at[source].add(jnp.concatenate(outputs))[:-1]

    def __call__(self, x: jax.Array, exact: bool) -> tuple[jax.Array, jax.Array]:
        """x[N, D] -> ([N, D], tokens per expert f32[E])."""
        weights, load = self.route(x)
        routed = self.dense(x, weights) if exact else self.dispatched(x, weights)
        return routed + self.shared(x), load


class Layer(nnx.Module):
    """Pre-norm attention and feed-forward (dense or mixture of experts)."""

    def __init__(self, config: ModelConfig, index: int, rngs: nnx.Rngs):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, rngs)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if index < config.first_k_dense_replace:
            self.mlp: MLP | MoE = MLP(config.hidden_size, config.intermediate_size, rngs)
        else:
            self.mlp = MoE(config, rngs)


class DeepseekV3(nnx.Module):
    """The causal language model."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = weight(rngs, config.vocab_size, config.hidden_size, std=0.2)
        self.layers = nnx.List([Layer(config, index, rngs) for index in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = weight(rngs, config.hidden_size, config.vocab_size, std=0.0)

    def __call__(self, tokens: jax.Array, exact: bool = True) -> tuple[jax.Array, jax.Array]:
        """tokens int32[B, T] -> (logits f32[B, T, vocab], load f32[MoE layers, E])."""
        batch, frequencies = tokens.shape[0], yarn_frequencies(self.config)
        x, loads = self.embed[...][tokens.reshape(-1)], []
        for layer in self.layers:
            x = x + layer.attention(layer.input_norm(x), frequencies, batch)
            hidden = layer.post_norm(x)
            if isinstance(layer.mlp, MoE):
                output, load = layer.mlp(hidden, exact)
                loads.append(load)
                x = x + output
            else:
                x = x + layer.mlp(hidden)
        logits = self.norm(x) @ self.lm_head[...]
        return logits.reshape(*tokens.shape, -1), jnp.stack(loads)


def loss_and_load(model: DeepseekV3, rows: jax.Array, exact: bool = True) -> tuple[jax.Array, jax.Array]:
    """Mean next-token loss in nats over rows int32[B, T + 1], and the expert loads."""
    logits, load = model(rows[:, :-1], exact)
    picked = jnp.take_along_axis(logits, rows[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked), load


def update_expert_biases(model: DeepseekV3, load: jax.Array, rate: jax.Array) -> None:
    """Auxiliary-loss-free balancing: raise the selection bias of under-used experts, lower that of others."""
    moe_layers = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)]
    for mlp, counts in zip(moe_layers, load, strict=True):
        mlp.bias[...] = mlp.bias[...] + rate * jnp.sign(counts.mean() - counts)
