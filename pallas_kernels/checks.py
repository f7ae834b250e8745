"""What every op asks of its arguments, in the same words: shapes that contradict each other are a ValueError.

What stands in tables and lengths is data, which nothing here sees. The same holds of it for every op and backend: a
length is cut to what its table has room for, and below 0 is 0; page numbers of tokens that no row sees may be any;
those of tokens that a row sees have to lie in the pool, which nothing asks.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats import fp8_row_bytes, is_fp8


def check_queries(rows: int, heads: int) -> None:
    """Refuse queries of nothing."""
    if not rows or not heads:
        raise ValueError(f"there is nothing to attend from: {rows} query rows of {heads} heads.")


def check_pages(pool: jax.Array, pages: jax.Array) -> None:
    """Refuse pools [P, K, ...] and tables [S, W] without a page, a slot or a column."""
    if pages.ndim != 2 or not pages.size or not pool.shape[0] or not pool.shape[1]:
        raise ValueError(
            f"there is nothing to attend to: a pool of {pool.shape[0]} pages of {pool.shape[1]} tokens, and a table "
            f"{list(pages.shape)} of them; give one of each at least, and the table as [sequences, pages]."
        )


def check_latents(pool: jax.Array, columns: int, value_width: int) -> None:
    """Refuse a pool whose rows are not those that absorbed queries of so many columns meet."""
    if not 0 < value_width < columns:
        raise ValueError(f"the latent width {value_width} is not inside the row of {columns} columns.")
    check_stored("queries", "rows", pool, columns, value_width)


def check_stored(queries: str, rows: str, pool: jax.Array, columns: int, latent: int) -> None:
    """Refuse a pool of another width, or of numbers that are none."""
    width, wanted = pool.shape[-1], fp8_row_bytes(latent, columns - latent) if is_fp8(pool) else columns
    if width != wanted:
        raise ValueError(
            f"{queries} of {columns} columns need {pool.dtype} {rows} of {wanted}, but the pool's have {width}."
        )
    if not is_fp8(pool) and not jnp.issubdtype(pool.dtype, jnp.floating):
        raise ValueError(f"{rows} are floating numbers, or FP8 as uint8 bytes: not {pool.dtype}.")


def indices(**named: Any) -> list[jax.Array]:
    """Arrays of whole numbers as int32. Refuses others, by their names."""
    for name, x in named.items():
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} are whole numbers, not {x.dtype}: give int32.")
    return [jnp.asarray(x).astype(jnp.int32) for x in named.values()]


def refuse_fp8(backend: str, pool: jax.Array) -> None:
    """Refuse FP8 rows where only numbers are read."""
    if is_fp8(pool):
        raise NotImplementedError(f"{backend} reads rows of numbers, not FP8 rows: those are for kernels.")


def within_table(lengths: jax.Array, pool: jax.Array, pages: jax.Array) -> jax.Array:
    """Lengths cut to what a table [S, W] of pages [P, K, ...] has room for."""
    return jnp.clip(lengths, 0, pages.shape[1] * pool.shape[1])
