"""How a token's latent row is stored: plain (BF16 and wider), or FP8 with its scales beside it.

An FP8 row of C latent and R rotary columns is C bytes of float8_e4m3fn, one float32 scale for every GROUP of them, then
R bfloat16: 656 bytes for 512 + 64. The three parts are read through bitcast views of the same buffer, which XLA gives
for nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

GROUP = 128  # latent columns that share a scale
FP8_MAX = 448.0


class Fp8Views(NamedTuple):
    """One pool of FP8 rows, seen three ways; P pages of K tokens."""

    latent: jax.Array  # float8_e4m3fn[P, K, bytes]: columns 0 to C
    scales: jax.Array  # f32[P, K, bytes / 4]: columns C / 4 to C / 4 + C / GROUP
    rotary: jax.Array  # bf16[P, K, bytes / 2]: the last R columns


def fp8_row_bytes(latent: int, rotary: int) -> int:
    """Bytes of a token; raises ValueError unless the latent columns are whole groups."""
    if latent % GROUP:
        raise ValueError(f"FP8 rows need a latent width that is a multiple of {GROUP}, not {latent}.")
    return latent + 4 * (latent // GROUP) + 2 * rotary


def is_fp8(pool: jax.Array) -> bool:
    """Whether a pool holds FP8 rows, by its dtype: bytes."""
    return pool.dtype == jnp.uint8


def fp8_views(pool: jax.Array) -> Fp8Views:
    """u8[P, K, bytes] as its three views. No byte moves."""
    pages, tokens, width = pool.shape
    return Fp8Views(
        jax.lax.bitcast_convert_type(pool, jnp.float8_e4m3fn),
        jax.lax.bitcast_convert_type(pool.reshape(pages, tokens, width // 4, 4), jnp.float32),
        jax.lax.bitcast_convert_type(pool.reshape(pages, tokens, width // 2, 2), jnp.bfloat16),
    )


def pack_fp8(rows: jax.Array, latent: int) -> jax.Array:
    """[..., C + R] as u8[..., bytes]: each group scaled so that its largest element is FP8's largest."""
    fp8_row_bytes(latent, rows.shape[-1] - latent)
    groups = rows[..., :latent].astype(jnp.float32).reshape(*rows.shape[:-1], -1, GROUP)
    scales = jnp.maximum(jnp.abs(groups).max(-1), 1e-30) / FP8_MAX
    values = (groups / scales[..., None]).astype(jnp.float8_e4m3fn).reshape(*rows.shape[:-1], latent)
    parts = (values, scales, rows[..., latent:].astype(jnp.bfloat16))
    as_bytes = [jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*rows.shape[:-1], -1) for x in parts]
    return jnp.concatenate(as_bytes, -1)


def unpack_fp8(pool: jax.Array, latent: int) -> jax.Array:
    """u8[P, K, bytes] as f32[P, K, C + R]."""
    views, groups = fp8_views(pool), latent // GROUP
    scales = jnp.repeat(views.scales[..., latent // 4 : latent // 4 + groups], GROUP, -1)
    rotary = views.rotary[..., (latent + 4 * groups) // 2 :].astype(jnp.float32)
    return jnp.concatenate([views.latent[..., :latent].astype(jnp.float32) * scales, rotary], -1)
