"""Read and write rows or pages of a pool by number, in place, by kernels where a GPU has them and by XLA elsewhere."""

from contextlib import suppress

import jax

from pallas_kernels.page_move import gather_pages, scatter_pages


def take(pool: jax.Array, slots: jax.Array, *, kernels: bool) -> jax.Array:
    """[N, ...] of a pool [P, ...] at slots i32[N]; zero where a slot lies outside [0, P)."""
    if kernels and slots.size:
        with suppress(NotImplementedError):  # more elements than the kernel counts
            return gather_pages(pool, slots, backend="triton")
    return pool.at[slots].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def put(pool: jax.Array, slots: jax.Array, rows: jax.Array, *, kernels: bool) -> jax.Array:
    """The pool [P, ...] with rows [N, ...] at slots i32[N]. A slot outside [0, P) drops its row; no other comes twice.

    XLA would otherwise compare and swap every element on a GPU, to be right for slots that come twice.
    """
    if kernels and slots.size:
        with suppress(NotImplementedError):
            return scatter_pages(pool, slots, rows, backend="triton")
    return pool.at[slots].set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)
