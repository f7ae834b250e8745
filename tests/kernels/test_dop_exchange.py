"""The exchange against numpy, bit by bit, on 2, 4 and 8 devices; what cannot run here is compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.dop_exchange import (
    Routing,
    choose_transfer,
    heads_to_owners,
    owners_to_heads,
    route_rows,
    transfer_seconds,
)
from pallas_kernels.dop_exchange import triton as kernel
from pallas_kernels.words import as_lines, word_bytes
from splash_jax.cost import load_hardware
from splash_jax.preflight.kernels import compile_kernels
from splash_jax.runtime.collectives import collective_bytes
from splash_jax.runtime.target import target_mesh
from tests.kernels.random_bits import random_bits

WIDTHS = {"aligned": (16, 8), "an odd number of bf16": (7, 3)}
INTERPRETED = {"backend": "triton", "interpret": True}


def as_bf16(x: np.ndarray) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.asarray(x), jnp.bfloat16)


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint16)


def exchange(
    ranks: int, parts: list[np.ndarray], out: np.ndarray, routing: Routing, **how: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Both ways: parts [N, H, width] with heads dealt over ranks, and out [T, C, H, V], as bits."""
    mesh = jax.make_mesh((ranks,), ("rank",), axis_types=(jax.sharding.AxisType.Auto,))

    def both(out: jax.Array, *parts: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = heads_to_owners(parts, routing, axis="rank", **how)
        return q[None], owners_to_heads(out[0], routing, axis="rank", **how)

    heads = P(None, "rank")
    specs = {"in_specs": (P("rank"), *[heads] * len(parts)), "out_specs": (P("rank"), heads), "check_vma": False}
    q, z = jax.jit(jax.shard_map(both, mesh=mesh, **specs))(as_bf16(out), *map(as_bf16, parts))
    return bits(q), bits(z)


@pytest.mark.parametrize(
    ("ranks", "widths", "how"),
    [
        (2, "aligned", {}),
        (4, "an odd number of bf16", {}),
        (8, "aligned", {}),
        (2, "aligned", INTERPRETED),
        (2, "an odd number of bf16", INTERPRETED),
    ],
    ids=str,
)
def test_every_row_meets_all_its_heads_at_its_owner_and_goes_back(ranks, widths, how, monkeypatch):
    monkeypatch.setattr(kernel, "TILE", 16)  # so that a row's heads are several tiles
    rng, N, heads, V, capacity = np.random.default_rng(ranks), 11, 3, 5, 10
    owners = rng.integers(0, ranks, N)
    owners[[2, 9]] = -1  # padding in the middle
    owners = np.where(np.arange(N) % 2, owners, 0)  # uneven: rank 0 has most
    owners[2] = -1
    routing = route_rows(owners, ranks=ranks, capacity=capacity)
    parts = [random_bits(rng, (N, ranks * heads, width), jnp.bfloat16) for width in WIDTHS[widths]]
    out = random_bits(rng, (ranks, capacity, ranks * heads, V), jnp.bfloat16)
    q, z = exchange(ranks, parts, out, routing, **how)

    want_q, want_z = np.zeros_like(q), np.zeros_like(z)
    taken = [0] * ranks
    for row, owner in enumerate(owners):
        if owner >= 0:
            want_q[owner, taken[owner]] = np.concatenate([part[row] for part in parts], -1)
            want_z[row] = out[owner, taken[owner]]
            taken[owner] += 1
    np.testing.assert_array_equal(q, want_q)
    np.testing.assert_array_equal(z, want_z)


def test_more_rows_than_room_are_refused():
    with pytest.raises(ValueError, match="owner 1 has 3 rows, but the exchange has room for 2: use a larger capacity"):
        route_rows(np.array([0, 1, 1, 1]), ranks=2, capacity=2)
    with pytest.raises(ValueError, match="owners 0 to 5 are not all among ranks 0 to 1"):
        route_rows(np.array([0, 5]), ranks=2, capacity=2)


def test_what_does_not_fit_together_is_refused():
    routing = route_rows(np.zeros(4, np.int32), ranks=2, capacity=4)
    nope, rope = jnp.zeros((4, 2, 8), jnp.bfloat16), jnp.zeros((4, 2, 4), jnp.float32)
    with pytest.raises(ValueError, match=r"unlike bfloat16\[4, 2, 8\], float32\[4, 2, 4\]"):
        heads_to_owners((nope, rope), routing, axis="rank")
    with pytest.raises(ValueError, match="5 rows, but a routing of 4"):
        heads_to_owners((jnp.zeros((5, 2, 8)),), routing, axis="rank")
    with pytest.raises(ValueError, match="no transfer 'nvshmem'; it has: padded, ragged, and to owners remote"):
        heads_to_owners((nope,), routing, axis="rank", transfer="nvshmem")
    with pytest.raises(ValueError, match=r"outputs \[4, 3, 8\] are not of 4 places and heads of 2 ranks"):
        owners_to_heads(jnp.zeros((4, 3, 8)), routing, axis="rank")


def test_the_rule_weighs_padding_against_a_latency():
    """DeepSeek-V3 on 8 ranks: 16 local heads of 576 BF16 columns a row."""
    rates = {"ranks": 8, "row_bytes": 16 * 576 * 2, "bytes_per_s": 4.5e11, "latency_s": 1e-5}
    few = transfer_seconds(rows=64, capacity=16, **rates)
    assert few["padded"] == pytest.approx(1e-5 + 7 * 16 * 18432 / 4.5e11)
    assert choose_transfer(few, platform="gpu") == "padded", "twice the bytes of a few rows cost less than a latency"
    many = transfer_seconds(rows=2048, capacity=512, **rates)
    assert many["ragged"] == pytest.approx(2e-5 + 7 * 256 * 18432 / 4.5e11)
    assert choose_transfer(many, platform="gpu") == "ragged"
    assert choose_transfer(many, platform="gpu", reachable=True) == "remote"
    assert choose_transfer(many, platform="cpu") == "padded"
    assert choose_transfer(many, platform="gpu", beside_compute=True) == "padded"


def routing_structs(ranks: int, rows: int, capacity: int, sharding: Any = None) -> Routing:
    sizes = Routing((ranks, capacity), (rows,), (ranks,))  # type: ignore[arg-type]
    return Routing(*(jax.ShapeDtypeStruct(size, jnp.int32, sharding=sharding) for size in sizes))


@pytest.mark.parametrize("transfer", ["padded", "ragged"])
def test_both_transfers_compile_for_eight_gpus(compiler, transfer):
    """DeepSeek-V3's heads: both ways together receive what Eq. 4 says, with every place in use."""
    mesh = target_mesh(load_hardware("h200").target, {"rank": 8})
    rows, heads, capacity = 64, 16, 8

    def both(nope: jax.Array, rope: jax.Array, out: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
        how = {"axis": "rank", "transfer": transfer, "backend": "ref"}
        return heads_to_owners((nope, rope), routing, **how)[None], owners_to_heads(out[0], routing, **how)

    split, own = P(None, "rank"), P("rank")
    specs = {"in_specs": (split, split, own, P()), "out_specs": (own, split), "check_vma": False}

    def struct(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    args = (struct(split, rows, 128, 512), struct(split, rows, 128, 64), struct(own, 8, capacity, 128, 512))
    lowered = jax.jit(jax.shard_map(both, mesh=mesh, **specs)).lower(
        *args, routing_structs(8, rows, capacity, NamedSharding(mesh, P()))
    )
    found = [c for c in collective_bytes(lowered.compile()) if c.kind.endswith("all-to-all")]
    assert {c.kind for c in found} == {"all-to-all" if transfer == "padded" else "ragged-all-to-all"}
    if transfer == "padded":
        per_row = 2 * 128 * (576 + 512)  # Eq. 4 with absorbed queries: all heads of a row, both ways
        assert 8 * sum(c.bytes_received for c in found) == rows * per_row * 7 // 8
    assert len(found) == 2 and heads * 8 == 128


@pytest.mark.parametrize(
    ("widths", "access"), [((512, 64), "v4.b32"), pytest.param((7, 3), "b16", marks=pytest.mark.slow)]
)
def test_packing_takes_the_widest_access_the_heads_allow(chip, widths, access):
    parts = tuple(jax.ShapeDtypeStruct((64, 16, width), jnp.bfloat16) for width in widths)

    def pack(nope: jax.Array, rope: jax.Array, rows: jax.Array) -> jax.Array:
        word = word_bytes(*(2 * width for width in widths))
        return kernel.pack(tuple(as_lines(x, lead=2, word=word) for x in (nope, rope)), rows)

    facts = compile_kernels(chip, pack, *parts, jax.ShapeDtypeStruct((64,), jnp.int32))["dop_pack"]
    assert set(facts.accesses) == {f"ld.global.{access}", f"st.global.{access}", "ld.global.b32"}, facts.accesses
    assert facts.spills == 0
