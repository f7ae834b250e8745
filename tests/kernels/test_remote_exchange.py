"""The single-sided exchange: compiled for eight GPUs, and its protocol run through a twin that CPUs can interpret.

The twin makes the same handshakes, in the same order, and the same stores to the same places, with the TPU's remote
copies and semaphores; only shared memory and the programs beside each other are missing.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from pallas_kernels.dop_exchange import Routing, heads_to_owners, route_rows
from splash_jax.preflight.kernels import compile_kernels


def twin(parts: tuple[jax.Array, ...], routing: Routing, *, ranks: int, mutant: str = "") -> jax.Array:
    """`remote.heads_to_owners` on CPU devices; `mutant` names a bug to plant."""
    heads, widths = parts[0].shape[1], [part.shape[2] for part in parts]
    capacity = routing.rows.shape[1]

    def kernel(rows: Any, counts: Any, *refs: Any) -> None:
        *sources, q, sent, came, ready, done = refs
        me = lax.axis_index("rank")
        q[...] = jnp.zeros_like(q)  # what was there before; no store may come earlier
        for distance in range(ranks):
            peer = lax.rem(me + distance, ranks)
            pl.semaphore_signal(ready.at[me], 1, device_id={"rank": peer})
        for distance in range(ranks):
            peer = lax.rem(me + distance, ranks)
            pl.semaphore_wait(ready.at[peer], 1)

            @pl.loop(0, counts[peer])
            def _row(place: jax.Array, peer: jax.Array = peer) -> None:
                first = 0
                for source, width in zip(sources, widths, strict=True):
                    head = 0 if mutant == "every rank's heads in one place" else me * heads
                    columns = pl.ds(0 if mutant == "parts on one another" else first, width)
                    copy = pltpu.make_async_remote_copy(
                        source.at[rows[peer, place]],
                        q.at[place, pl.ds(head, heads), columns],
                        sent,
                        came,
                        device_id={"rank": peer},
                    )
                    copy.start()
                    copy.wait_send()
                    first += width

            pl.semaphore_signal(done, 1, device_id={"rank": peer})
        pl.semaphore_wait(done, ranks)

        @pl.loop(0, counts[me] * ranks)  # the twin's copies count their arrivals too, one by one
        def _arrived(_: jax.Array) -> None:
            for source in sources:
                pltpu.make_async_copy(source.at[0], source.at[0], came).wait()

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((capacity, ranks * heads, sum(widths)), parts[0].dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] * 2 + [pl.BlockSpec(memory_space=pl.ANY)] * len(parts),
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        scratch_shapes=[
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.REGULAR((ranks,)),
            pltpu.SemaphoreType.REGULAR,
        ],
        interpret=pltpu.InterpretParams(),
        compiler_params=pltpu.CompilerParams(collective_id=0),
    )(routing.rows, routing.counts, *parts)


def both(ranks: int, mutant: str = "") -> tuple[np.ndarray, np.ndarray]:
    """What the twin and the padded exchange leave on the owners, [T, C, H, D], of rows dealt unevenly."""
    rng, N, heads = np.random.default_rng(ranks), 9, 2
    owners = np.where(np.arange(N) % 3, rng.integers(0, ranks, N), 0)
    owners[4] = -1
    routing = route_rows(owners, ranks=ranks, capacity=7)
    parts = tuple(jnp.asarray(rng.integers(0, 2**31, (N, ranks * heads, width)), jnp.int32) for width in (16, 8))
    mesh = jax.make_mesh((ranks,), ("rank",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(None, "rank"),) * 2, "out_specs": P("rank"), "check_vma": False}

    def run(exchange: Any) -> np.ndarray:
        local = lambda *parts: exchange(parts, routing)[None]  # noqa: E731
        return np.asarray(jax.jit(jax.shard_map(local, mesh=mesh, **specs))(*parts))

    return run(partial(twin, ranks=ranks, mutant=mutant)), run(partial(heads_to_owners, axis="rank"))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_protocol_leaves_what_the_padded_exchange_does(ranks):
    got, want = both(ranks)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mutant", ["every rank's heads in one place", "parts on one another"])
def test_stores_to_the_wrong_place_show(mutant):
    got, want = both(2, mutant)
    assert not np.array_equal(got, want)


def structs(rows: int, capacity: int, widths: tuple[int, int]) -> tuple[Any, ...]:
    routing = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, capacity), (rows,), (8,))]
    return *(jax.ShapeDtypeStruct((rows, 128, width), jnp.bfloat16) for width in widths), *routing


def local(nope: jax.Array, rope: jax.Array, *routing: jax.Array) -> jax.Array:
    return heads_to_owners((nope, rope), Routing(*routing), axis="rank", transfer="remote")[None]


@pytest.mark.slow
def test_it_compiles_to_copies_of_the_tensor_engine_and_signals_between_gpus(compiler):
    heads = P(None, "rank")
    kernels = compile_kernels(
        "h200",
        local,
        *structs(64, 16, (512, 64)),
        ranks=8,
        in_specs=(heads, heads, P(), P(), P()),
        out_specs=P("rank"),
    )
    kernel = kernels["dop_exchange_remote"]
    assert kernel.instructions["cp.async.bulk.tensor"] >= 8 * 2 * 3, "three pieces in and out, for each of eight peers"
    assert kernel.spills == 0 and kernel.registers <= 64


def test_heads_that_the_tensor_engine_cannot_copy_are_refused():
    parts = [jax.ShapeDtypeStruct((4, 2, width), jnp.bfloat16) for width in (7, 3)]
    routing = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 4), (4,), (2,))]
    with pytest.raises(NotImplementedError, match=r"multiples of 16 bytes: no heads of \[7, 3\] bfloat16 columns"):
        jax.eval_shape(local, *parts, *routing)
