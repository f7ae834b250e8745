"""The pieces of a step as functions of local views, to be run in `jax.shard_map` over a layout's mesh."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mla_attention import HeadWeights, PageTable, mla_attention
from splash_jax.layouts import Exchange
from splash_jax.models import deepseek_v3 as model
from splash_jax.ownership import Bucket, Layout
from splash_jax.runtime import sampler
from splash_jax.runtime.batch import unpack_local
from splash_jax.runtime.pages import put
from splash_jax.runtime.sampler import Drawn, SamplerState
from splash_jax.runtime.shapes import NOWHERE, Shapes, sample_rows


class Step:
    """The step functions of one layout and bucket. Shapes in comments are local views; see `batch.Batch`."""

    def __init__(self, shapes: Shapes, layout: Layout, bucket: Bucket) -> None:
        self.shapes, self.layout, self.bucket = shapes, layout, bucket
        self.exchange = Exchange(layout)

    def embed(self, table: jax.Array, last: jax.Array, rows: jax.Array) -> jax.Array:
        """Rows' embeddings [groups carried..., R, d]; a row without a token takes the last one of its slot."""
        ids = jnp.where(rows[0] >= 0, rows[0], last[rows[1]])
        with jax.named_scope("embed"):
            part = model.embed(self.shapes.model, table, ids, self.exchange.rank())
            return self.exchange.reduce_rows(part)

    def layer(
        self, w: dict[str, Any], x: jax.Array, pool: jax.Array, rows: jax.Array, local: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """One layer: x [groups carried..., R, d] and the layer's pool [1, P, page_size, width], which it updates."""
        exchange, shapes, bucket = self.exchange, self.shapes, self.bucket
        here = unpack_local(shapes, self.layout, bucket, local[0])
        slots, positions = exchange.carried_rows(rows[1]), exchange.carried_rows(rows[2])
        own_positions = exchange.own_rows(positions)
        stored: list[jax.Array] = []

        def kernel(q: jax.Array, heads: HeadWeights | None = None) -> tuple[jax.Array, jax.Array]:
            work = shapes.cut_decodes(self.layout, np.zeros(bucket.single_rows, np.int32))
            return mla_attention(
                q,
                own_positions,
                stored[0],
                PageTable(here.pages, here.held, here.lag),
                value_width=shapes.model.kv_lora_rank,
                tile=bucket.tile,
                shares=self.layout.position_shares,
                interleave=shapes.kv.interleave,
                heads=heads,
                prompts=None if heads is None else first_tiles(exchange.own_rows(slots), bucket),
                work=work and replace(work, items=here.items, first=here.first, turns=here.turns),
                backend=shapes.attention_backend,
                chip=shapes.attention_chip,
            )

        def attend(family: model.Attention, x: jax.Array) -> jax.Array:
            history = family.history(exchange.own_rows(x), own_positions)
            stored.append(_store(pool[0], here.write, history, shapes.kernels))
            q = family.queries(x, positions)
            if self.layout.attends_locally and shapes.kernels:
                values = exchange.attend(q, partial(kernel, heads=HeadWeights(family.w_uk, family.w_uv)))
            else:
                values = family.values(exchange.attend(family.absorb(q), kernel))
            return exchange.reduce_heads(family.outputs(values))

        def spread(f: Any, x: jax.Array) -> jax.Array:
            every = exchange.gather_rows(x)
            y = f(every.reshape(-1, every.shape[-1]), rows[2].reshape(-1) >= 0, exchange.rank())
            return exchange.reduce_rows(y.reshape(every.shape))

        x = model.layer(shapes.model, w, x, attend, spread)
        return x, stored[0][None]

    def head(
        self,
        w: dict[str, jax.Array],
        state: SamplerState,
        x: jax.Array,
        picks: jax.Array,
        floats: jax.Array,
        ints: jax.Array,
    ) -> tuple[SamplerState, Drawn]:
        """Draw a token for the picked row of every sequence; each rank draws its share of them."""
        exchange, cfg = self.exchange, self.shapes.model
        mine = exchange.carried_rows(picks)
        chosen = exchange.gather_rows(jnp.take_along_axis(x, mine[..., None], -2)).reshape(-1, x.shape[-1])
        total = sample_rows(self.layout, self.bucket)
        chosen = jnp.pad(chosen, ((0, total - chosen.shape[0]), (0, 0)))
        names = self.layout.axis_names
        with jax.named_scope("head"):
            part = model.logits(cfg, w["final_norm"], w["lm_head"], chosen, exchange.rank())
            logits = jax.lax.all_to_all(part, names, split_axis=0, concat_axis=1, tiled=True)[:, : cfg.vocab_size]
        with jax.named_scope("sample"):
            slots = ints[:, 0]
            counts = state.counts.at[slots].get(mode="clip") if self.shapes.penalties else None
            drawn = sampler.draw(logits, floats, ints, counts)
            both = jnp.stack([slots, drawn.tokens[:, 0]], 1)
            both = jax.lax.all_gather(both, names, axis=0, tiled=True)
            return sampler.remember(state, both[:, 0], both[:, 1]), drawn

    def score(self, w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        """Logits of every row, f32[N, V / T]: this rank's part of the vocabulary."""
        every = self.exchange.gather_rows(x).reshape(-1, x.shape[-1])
        return model.logits(self.shapes.model, w["final_norm"], w["lm_head"], every, self.exchange.rank())


def reorder_rows(src: Exchange, dst: Exchange, x: jax.Array, order: jax.Array) -> jax.Array:
    """Rows x as `src` carries them to those that `dst` carries: row i of `dst` is row `order[i]` of `src`.

    `order` i32[groups..., R] counts rows over all groups; -1 stands for padding, which becomes zero.
    """
    every = src.gather_rows(x)
    flat = every.reshape(-1, every.shape[-1])
    mine = dst.carried_rows(order)
    return jnp.where(mine[..., None] >= 0, flat.at[jnp.maximum(mine, 0)].get(mode="clip"), 0)


def first_tiles(slots: jax.Array, bucket: Bucket) -> jax.Array | None:
    """i32[tiles]: for every tile of rows in request slots i32[R], the first tile of the same request; None without."""
    if not bucket.tiles:
        return None
    slot = slots[bucket.decode :: bucket.tile]
    return (slot[:, None] == slot[None]).argmax(1).astype(jnp.int32)


def _store(pool: jax.Array, slots: jax.Array, rows: jax.Array, kernels: bool) -> jax.Array:
    """Write rows [R, width] at flat slots i32[R] of a pool [P, page_size, width], in place; out of bounds: dropped.

    A pool of words takes the rows' bits.
    """
    if rows.dtype != pool.dtype:
        rows = jax.lax.bitcast_convert_type(rows, pool.dtype)
    if len(slots) == 1:  # XLA:CPU copies the whole pool, several times, around a scatter of a single row
        slots, rows = jnp.pad(slots, (0, 1), constant_values=NOWHERE), jnp.pad(rows, ((0, 1), (0, 0)))
    return put(pool.reshape(-1, pool.shape[-1]), slots, rows, kernels=kernels).reshape(pool.shape)
