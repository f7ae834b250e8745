"""One layer of the DeepSeek-V3 family, written once for every layout.

The layer is handed `attend` and `spread`: how rows and heads travel is theirs to know.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from splash_jax.models import mla
from splash_jax.models.config import ModelConfig
from splash_jax.models.math import add_bias, dot, gated_mlp, rms_norm
from splash_jax.models.moe import run_experts


class Attention(NamedTuple):
    """The pieces of an attention family that a layout arranges.

    `queries(x, positions)`: [..., d] to [..., heads here, n + p]. `history(x, positions)`: [..., d] to the rows to
    store, [..., c + p]. `outputs(out)`: [..., heads here, v] to [..., d], partial over split heads. `absorb` and
    `values` lead from such queries to those that meet histories as they are stored, [..., heads here, c + p], and back
    from what is read off them, [..., heads here, c]. A kernel that has the heads of `w_uk` [heads here, c, n] and
    `w_uv` [heads here, v, c] may do both by itself.
    """

    queries: Callable[[jax.Array, jax.Array], jax.Array]
    history: Callable[[jax.Array, jax.Array], jax.Array]
    outputs: Callable[[jax.Array], jax.Array]
    absorb: Callable[[jax.Array], jax.Array]
    values: Callable[[jax.Array], jax.Array]
    w_uk: jax.Array
    w_uv: jax.Array


@runtime_checkable
class Attend(Protocol):
    """Attention of rows x [..., d], whole sums."""

    def __call__(self, family: Attention, x: jax.Array) -> jax.Array: ...


@runtime_checkable
class Spread(Protocol):
    """Run `f(rows [N, d], valid bool[N], rank)` on all rows on every rank, and sum what the ranks return."""

    def __call__(self, f: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array: ...


def layer(cfg: ModelConfig, w: Mapping[str, Any], x: jax.Array, attend: Attend, spread: Spread) -> jax.Array:
    """x [..., d] through one decoder layer with weights `w` (see `deepseek_v3_weights`), local views."""
    attn, moved = w["attn"], w["moved"]
    family = Attention(
        queries=lambda h, positions: mla.queries(cfg, attn, moved, h, positions),
        history=lambda h, positions: mla.latents(cfg, attn, h, positions),
        outputs=lambda out: mla.outputs(moved, out),
        absorb=lambda q: mla.absorb(moved, q),
        values=lambda out: mla.values(moved, out),
        w_uk=moved["w_uk"],
        w_uv=moved["w_uv"],
    )
    with jax.named_scope("attention"):
        x = x + add_bias(attend(family, rms_norm(x, w["attn_norm"], cfg.rms_norm_eps)), attn.get("o_bias"))
    with jax.named_scope("experts" if "moe" in w else "mlp"):
        return x + spread(
            lambda h, valid, rank: _feed_forward(cfg, w, h, valid, rank),
            rms_norm(x, w["mlp_norm"], cfg.rms_norm_eps),
        )


def _feed_forward(cfg: ModelConfig, w: Mapping[str, Any], h: jax.Array, valid: jax.Array, rank: jax.Array) -> jax.Array:
    """This rank's part of the dense or expert layer for rows h [N, d]."""
    if "moe" not in w:
        return gated_mlp(h, w["mlp"]["gate_up"], w["mlp"]["down"])
    y = run_experts(cfg, w["moe"], h, valid, rank)
    return y + gated_mlp(h, w["shared"]["gate_up"], w["shared"]["down"]) if "shared" in w else y


def embed(cfg: ModelConfig, table: jax.Array, ids: jax.Array, rank: jax.Array) -> jax.Array:
    """This rank's part of the embedding of ids i32[...]: rows of `table` [V / ranks, d], zero for other ranks' ids."""
    local = ids - (rank * table.shape[0]).astype(ids.dtype)
    mine = (local >= 0) & (local < table.shape[0])
    rows = table.at[jnp.where(mine, local, 0)].get(mode="clip")
    return jnp.where(mine[..., None], rows, 0)


def logits(cfg: ModelConfig, final_norm: jax.Array, head: jax.Array, x: jax.Array, rank: jax.Array) -> jax.Array:
    """Rows x [N, d] to this rank's part of the vocabulary, f32[N, V / ranks]; padding entries are -inf."""
    h = rms_norm(x, final_norm, cfg.rms_norm_eps)
    out = dot(h, head, jnp.float32)
    token = rank * head.shape[0] + jnp.arange(head.shape[0])
    return jnp.where(token[None] < cfg.vocab_size, out, -jnp.inf)
