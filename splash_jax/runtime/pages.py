"""Read and write rows or pages of a pool by number, in place, by kernels where a GPU has them and by XLA elsewhere."""

from contextlib import suppress

import jax

from pallas_kernels.page_move import gather_pages, scatter_pages


def take(pool: jax.Array, slots: jax.Array, *, kernels: bool) -> jax.Array:
    """[N, ...] of a pool [P, ...] at slots i32[N]; anything where there is no slot."""
    if kernels and slots.size:
        with suppress(NotImplementedError):  # more words than the kernel counts
            return gather_pages(pool, slots, backend="triton")
    return pool.at[slots].get(mode="clip")


def put(pool: jax.Array, slots: jax.Array, rows: jax.Array, *, kernels: bool) -> jax.Array:
    """The pool [P, ...] with rows [N, ...] at slots i32[N]; those beyond its end are dropped, no other comes twice.

    XLA would otherwise compare and swap every element on a GPU, to be right for slots that come twice.
    """
    if kernels and slots.size:
        with suppress(NotImplementedError):
            return scatter_pages(pool, slots, rows, backend="triton")
    return pool.at[slots].set(rows, mode="drop", unique_indices=True)
