"""Draw tokens on the device. A draw depends only on logits, settings and (seed, sample index, token index)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from splash_jax.runtime.batch import FLOAT_FIELDS, INT_FIELDS
from splash_jax.runtime.shapes import MAX_TOP_LOGPROBS

NOT_FINITE = -1  # token of a row whose logits hold a NaN or are all -inf


class SamplerState(NamedTuple):
    """What the sampler remembers per slot. Replicated, donated to every step."""

    last: jax.Array  # i32[slots]: last token drawn
    counts: jax.Array  # i32[slots, V]: output occurrences, plus PROMPT where the prompt has the token; or [1, 1]


PROMPT = 1 << 20  # larger than any output can be long


class Drawn(NamedTuple):
    """One step's results, rows dealt over the ranks."""

    tokens: jax.Array  # i32[S, 1 + 20]: the token drawn, then the most likely ones
    logprobs: jax.Array  # f32[S, 1 + 20]: their log-probabilities under the model, before any setting


def draw(logits: jax.Array, floats: jax.Array, ints: jax.Array, counts: jax.Array | None) -> Drawn:
    """Draw one token per row of logits f32[S, V] with settings as `batch.Batch` lays them out; counts i32[S, V]."""
    f = {name: floats[:, i] for i, name in enumerate(FLOAT_FIELDS)}
    i = {name: ints[:, k] for k, name in enumerate(INT_FIELDS)}
    raw = logits
    logits = _ban(logits, i["ban_stops"] > 0, ints[:, len(INT_FIELDS) :])
    if counts is not None:
        logits = _penalise(logits, counts, f["presence"], f["frequency"], f["repetition"])
    greedy = logits.argmax(-1).astype(jnp.int32)
    random = f["temperature"] > 0
    sampled = jax.lax.cond(random.any(), lambda: _sample(logits, f, i), lambda: greedy)
    token = jnp.where(random, sampled, greedy)
    bad = jnp.isnan(raw).any(-1) | ~jnp.isfinite(logits.max(-1))
    norm = jax.nn.logsumexp(raw, -1)
    chosen = jnp.take_along_axis(raw, token[:, None], 1)[:, 0] - norm
    empty = (
        jnp.zeros((raw.shape[0], MAX_TOP_LOGPROBS), raw.dtype),
        jnp.zeros((raw.shape[0], MAX_TOP_LOGPROBS), jnp.int32),
    )
    top, top_ids = jax.lax.cond((i["top_logprobs"] > 0).any(), lambda: _top(raw), lambda: empty)
    tokens = jnp.concatenate([jnp.where(bad, NOT_FINITE, token)[:, None], top_ids], 1)
    return Drawn(tokens, jnp.concatenate([chosen[:, None], top - norm[:, None]], 1))


def _top(raw: jax.Array) -> tuple[jax.Array, jax.Array]:
    k = min(MAX_TOP_LOGPROBS, raw.shape[1])
    values, ids = jax.lax.top_k(raw, k)
    pad = ((0, 0), (0, MAX_TOP_LOGPROBS - k))
    return jnp.pad(values, pad, constant_values=-jnp.inf), jnp.pad(ids, pad)


def _ban(logits: jax.Array, active: jax.Array, ids: jax.Array) -> jax.Array:
    columns = jnp.where(active[:, None] & (ids >= 0), ids, logits.shape[1])
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, columns].set(-jnp.inf, mode="drop")


def _penalise(
    logits: jax.Array, counts: jax.Array, presence: jax.Array, frequency: jax.Array, repetition: jax.Array
) -> jax.Array:
    """Presence and frequency count output tokens, repetition the prompt's too. Neutral rows stay bitwise equal."""
    output = counts % PROMPT
    repeated = jnp.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
    out = jnp.where((counts > 0) & (repetition[:, None] != 1), repeated, logits)
    taken = (output > 0).astype(jnp.float32) * presence[:, None] + output.astype(jnp.float32) * frequency[:, None]
    return jnp.where(((presence != 0) | (frequency != 0))[:, None], out - taken, out)


def _sample(logits: jax.Array, f: dict[str, jax.Array], i: dict[str, jax.Array]) -> jax.Array:
    scaled = logits / jnp.where(f["temperature"] > 0, f["temperature"], 1.0)[:, None]
    narrowed = ((i["top_k"] > 0) | (f["top_p"] < 1)).any()
    scaled = jax.lax.cond(narrowed, lambda s: _top_k_top_p(s, i["top_k"], f["top_p"]), lambda s: s, scaled)
    floor = scaled.max(-1, keepdims=True) + jnp.log(f["min_p"])[:, None]
    scaled = jnp.where(scaled < floor, -jnp.inf, scaled)

    def noise(high: jax.Array, low: jax.Array, sample: jax.Array, token: jax.Array) -> jax.Array:
        seed = jax.random.wrap_key_data(jnp.stack([high, low]).astype(jnp.uint32), impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(seed, sample), token)
        return jax.random.gumbel(key, (logits.shape[1],))

    return (scaled + jax.vmap(noise)(i["seed_high"], i["seed"], i["sample"], i["token"])).argmax(-1).astype(jnp.int32)


def _top_k_top_p(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keep the k largest, then the smallest set of them that holds probability p (at least one)."""
    ranked = -jnp.sort(-logits, axis=-1)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, logits.shape[1]), logits.shape[1])
    ranked = jnp.where(jnp.arange(logits.shape[1])[None] < k[:, None], ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, -1)
    before = jnp.cumsum(probability, -1) - probability
    inside = (before < top_p[:, None]) | (top_p[:, None] >= 1)
    kept = (inside & (ranked > -jnp.inf)).sum(-1)
    least = jnp.take_along_axis(ranked, jnp.maximum(kept - 1, 0)[:, None], 1)
    return jnp.where(logits < least, -jnp.inf, logits)


def remember(state: SamplerState, slots: jax.Array, tokens: jax.Array) -> SamplerState:
    """State after `tokens` i32[S] were drawn for `slots` i32[S] (out of bounds: no slot)."""
    last = state.last.at[slots].set(tokens, mode="drop")
    counts = state.counts
    if counts.shape[0] == last.shape[0]:
        counts = counts.at[slots, tokens].add(1, mode="drop", wrap_negative_indices=False)
    return SamplerState(last, counts)
