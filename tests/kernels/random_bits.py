"""Bits that no rounding and no flushing of denormals would leave as they are."""

import jax.numpy as jnp
import numpy as np


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Any value of a dtype: denormals, infinities and NaNs too, but of NaNs the usual one, for CPUs change others."""
    unsigned = np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")
    bits = rng.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True)
    if not jnp.issubdtype(dtype, jnp.floating):
        return bits
    usual = np.array(np.nan, dtype).view(unsigned)
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(bits.view(dtype)), usual, bits)
