"""Rows of a pool by number: a slot outside the pool drops what is written, reads as zero: by XLA as by the kernel."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_move import gather_pages, scatter_pages
from splash_jax.runtime.pages import put, take
from splash_jax.runtime.shapes import NOWHERE

SLOTS = jnp.asarray([4, -1, 0, 6, NOWHERE, -7, 2**31 - 1, -(2**31)], jnp.int32)  # of a pool of six
INSIDE = [0, 2]  # of SLOTS
DTYPES = ("float32", "bfloat16", "uint16", "uint8")


def filled(shape: tuple[int, ...], dtype: str, first: int) -> jnp.ndarray:
    return (jnp.arange(np.prod(shape)).reshape(shape) % 97 + first).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_outside_is_dropped(dtype):
    pool, rows = filled((6, 2, 4), dtype, 1), filled((len(SLOTS), 2, 4), dtype, 101)
    expected = np.array(pool)
    expected[np.asarray(SLOTS)[INSIDE]] = np.asarray(rows)[INSIDE]
    written = put(pool, SLOTS, rows, kernels=False)
    np.testing.assert_array_equal(np.asarray(written), expected)
    by_kernel = scatter_pages(pool, SLOTS, rows, backend="triton", interpret=True)
    np.testing.assert_array_equal(np.asarray(by_kernel), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_outside_reads_as_zero(dtype):
    pool = filled((6, 2, 4), dtype, 1)
    expected = np.zeros((len(SLOTS), 2, 4), np.asarray(pool).dtype)
    expected[INSIDE] = np.asarray(pool)[np.asarray(SLOTS)[INSIDE]]
    np.testing.assert_array_equal(np.asarray(take(pool, SLOTS, kernels=False)), expected)
    by_kernel = gather_pages(pool, SLOTS, backend="triton", interpret=True)
    np.testing.assert_array_equal(np.asarray(by_kernel), expected)


def test_no_slots_move_nothing():
    pool, none = filled((6, 4), "float32", 1), jnp.zeros(0, jnp.int32)
    np.testing.assert_array_equal(np.asarray(put(pool, none, pool[:0], kernels=False)), np.asarray(pool))
    assert take(pool, none, kernels=False).shape == (0, 4)
