"""Pages are moved bit by bit: every backend against numpy, on dtypes and sizes that are aligned and that are not."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.page_move import GATHERS, gather_pages, scatter_pages, send_pages
from pallas_kernels.page_move import triton as kernel
from splash_jax.preflight.kernels import compile_kernels
from tests.kernels.random_bits import random_bits

PAGES = {
    "bf16 latents": ((4, 72), jnp.bfloat16),
    "FP8 rows": ((3, 164), jnp.uint8),
    "an odd number of bytes": ((3, 5), jnp.uint8),
    "an odd number of bf16": ((3, 5), jnp.bfloat16),
    "float32": ((5,), jnp.float32),
}
BACKENDS = pytest.mark.parametrize("how", [{"backend": name, "interpret": name != "ref"} for name in GATHERS], ids=str)


def pool_of(name: str, pages: int, seed: int = 0) -> jax.Array:
    """Pages of random bits, NaNs among them."""
    shape, dtype = PAGES[name]
    raw = random_bits(np.random.default_rng(seed), (pages, *shape), dtype)
    return jax.lax.bitcast_convert_type(jnp.asarray(raw), dtype)


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@BACKENDS
@pytest.mark.parametrize("name", PAGES)
def test_pages_come_out_and_go_in_bit_by_bit(name, how, monkeypatch):
    monkeypatch.setattr(kernel, "STRETCH", 64)  # so that a page is several stretches, the last one short
    pool, slots = pool_of(name, 6), jnp.asarray([4, -1, 0, 6, 5, 2**30], jnp.int32)
    taken = bits(jax.jit(partial(gather_pages, **how))(pool, slots))
    for row, slot in zip(taken, [4, None, 0, None, 5, None], strict=True):
        np.testing.assert_array_equal(row, 0 if slot is None else bits(pool)[slot])

    other = pool_of(name, 6, seed=1)
    written = bits(jax.jit(partial(scatter_pages, **how))(pool, slots, other))
    want = bits(pool).copy()
    want[[4, 0, 5]] = bits(other)[[0, 2, 4]]
    np.testing.assert_array_equal(written, want)


@pytest.mark.parametrize(
    ("ranks", "chunks", "how"),
    [(2, 1, {}), (4, 3, {}), (8, 2, {}), (2, 2, {"backend": "triton", "interpret": True})],
    ids=str,
)
def test_pages_reach_the_ranks_they_are_sent_to(ranks, chunks, how):
    rng, sends, pages = np.random.default_rng(ranks), 6, 64
    mesh = jax.make_mesh((ranks,), ("rank",), axis_types=(jax.sharding.AxisType.Auto,))
    pool = pool_of("an odd number of bf16", ranks * pages)
    read = np.stack([rng.integers(0, pages, (ranks, sends)) for _ in range(ranks)]).astype(np.int32)
    write = np.stack([rng.permutation(pages)[: ranks * sends].reshape(ranks, sends) for _ in range(ranks)])
    write = np.where(rng.random(write.shape) < 0.3, -1, write).astype(np.int32)  # room in the exchange, nothing to send

    def move(old: jax.Array, r: jax.Array, w: jax.Array) -> jax.Array:
        return send_pages(old, jnp.zeros_like(old), r[0], w[0], axis="rank", chunks=chunks, **how)

    specs = {"in_specs": P("rank"), "out_specs": P("rank"), "check_vma": False}
    moved = bits(jax.jit(jax.shard_map(move, mesh=mesh, **specs))(pool, read, write))
    before = bits(pool).reshape(ranks, pages, -1)
    want = np.zeros_like(before)
    for receiver in range(ranks):
        for sender in range(ranks):
            some = write[receiver, sender] >= 0
            want[receiver, write[receiver, sender][some]] = before[sender, read[sender, receiver][some]]
    np.testing.assert_array_equal(moved.reshape(want.shape), want)


def test_what_cannot_be_is_refused():
    pool, slots = jnp.zeros((4, 8), jnp.bfloat16), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=r"3 slots of a bfloat16 pool of pages \(8,\) cannot take bfloat16\[2, 8\]"):
        scatter_pages(pool, slots, jnp.zeros((2, 8), jnp.bfloat16))
    with pytest.raises(ValueError, match="7 pages per rank cannot be sent in 2 equal chunks"):
        send_pages(pool, pool, jnp.zeros((2, 7), jnp.int32), jnp.zeros((2, 7), jnp.int32), axis="rank", chunks=2)
    with pytest.raises(ValueError, match="gather_pages has no backend 'cuda'; it has: triton, ref"):
        gather_pages(pool, slots, backend="cuda")
    with pytest.raises(ValueError, match="slots are whole numbers, not float32: give int32"):
        gather_pages(pool, slots.astype(jnp.float32))
    with pytest.raises(
        ValueError, match=r"pages bfloat16\[8\] at \[2, 4\] slots do not go to pages bfloat16\[9\] at \[2, 4\]"
    ):
        both = jnp.zeros((2, 4), jnp.int32)
        send_pages(pool, jnp.zeros((4, 9), jnp.bfloat16), both, both, axis="rank")


@pytest.mark.parametrize(
    ("shape", "dtype", "access"),
    [
        ((64, 656), jnp.uint8, "v4.b32"),
        pytest.param((64, 576), jnp.bfloat16, "v4.b32", marks=pytest.mark.slow),
        pytest.param((3, 5), jnp.bfloat16, "b16", marks=pytest.mark.slow),
    ],
)
def test_a_page_is_copied_by_the_widest_access_its_size_allows(chip, shape, dtype, access):
    slots: Any = jax.ShapeDtypeStruct((128,), jnp.int32)
    pool = jax.ShapeDtypeStruct((1000, *shape), dtype)
    copy = compile_kernels(chip, partial(gather_pages, backend="triton"), pool, slots)["page_gather"]
    assert set(copy.accesses) == {f"ld.global.{access}", f"st.global.{access}", "ld.global.b32"}, copy.accesses
    assert copy.spills == 0 and copy.smem == 0
    put = compile_kernels(
        chip, partial(scatter_pages, backend="triton"), pool, slots, jax.ShapeDtypeStruct((128, *shape), dtype)
    )
    assert f"st.global.{access}" in put["page_scatter"].accesses
