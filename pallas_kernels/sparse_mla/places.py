"""Where selected tokens lie, resolved once for every implementation: a few words a token beside its row's hundreds.

Letters: R rows, S sequences, K selected tokens a row, W pages per sequence.
"""

import jax
import jax.numpy as jnp


def places_of(selected: jax.Array, pages: jax.Array, page_size: int) -> jax.Array:
    """i32[R, K]: page * page_size + slot of every selected token, counted over the pool; -1 where there is none."""
    (R, K), (S, W) = selected.shape, pages.shape
    own = selected.reshape(S, R // S * K)
    there = (own >= 0) & (own < W * page_size)
    token = jnp.where(there, own, 0)
    page = jnp.take_along_axis(pages, token // page_size, 1)
    return jnp.where(there, page * page_size + token % page_size, -1).reshape(R, K)


def counts_of(places: jax.Array) -> jax.Array:
    """i32[R]: how many leading columns hold every token of a row."""
    column = jnp.arange(1, places.shape[1] + 1, dtype=jnp.int32)
    return jnp.where(places >= 0, column[None], 0).max(1, initial=0)
