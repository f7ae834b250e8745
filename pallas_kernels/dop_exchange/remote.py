"""The exchange to owners as one kernel: every rank stores its heads straight where its peers' attention reads them.

Nothing is packed or unpacked and nothing is padded: a row's heads go from the projections' outputs through shared
memory into the owner's queries. Two handshakes frame the stores:

* `ready[j]` of a rank counts the programs of rank j that have started for it. Rank j's stream runs this kernel then, so
  what its queries' buffer held before has been read. A program stores to a peer only after that.
* `done` counts the programs of all ranks that have stored what they had for this rank. The kernel ends after them all.

Needs peers that can address each other's memory: GPUs of one process, or of several with NVSHMEM.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dop_exchange.routing import Routing

BOX = 256  # columns that one TMA copy takes
PROGRAMS = 4  # per peer, each with every PROGRAMS-th of its rows


def heads_to_owners(parts: tuple[jax.Array, ...], routing: Routing, *, axis: str) -> jax.Array:
    """See `api.heads_to_owners`; places without a row hold anything. Refuses heads that TMA cannot copy."""
    heads, dtype = parts[0].shape[1], parts[0].dtype
    widths = [part.shape[2] for part in parts]
    if any(width * dtype.itemsize % 16 for width in widths):
        raise NotImplementedError(f"TMA copies multiples of 16 bytes: no heads of {widths} {dtype} columns.")
    ranks, capacity = routing.rows.shape
    pieces = [
        (part, first, min(BOX, width - first)) for part, width in enumerate(widths) for first in range(0, width, BOX)
    ]
    kernel = plgpu.kernel(
        functools.partial(_kernel, axis=axis, ranks=ranks, heads=heads, pieces=pieces, widths=widths),
        out_type=jax.ShapeDtypeStruct((capacity, ranks * heads, sum(widths)), dtype),
        grid=(ranks, PROGRAMS),
        grid_names=("hop", "program"),
        scratch_types=[
            [plgpu.SMEM((heads, width), dtype) for _, _, width in pieces],
            plgpu.Barrier(num_arrivals=len(pieces)),
            plgpu.SemaphoreType.REGULAR((ranks,)),
            plgpu.SemaphoreType.REGULAR,
        ],
        kernel_name="dop_exchange_remote",
    )
    return kernel(routing.rows, routing.counts, *parts)


def _kernel(
    rows: Any, counts: Any, *refs: Any, axis: str, ranks: int, heads: int, pieces: list[Any], widths: list[int]
) -> None:
    *parts, q, buffers, here, ready, done = refs
    hop, program, me = lax.axis_index("hop"), lax.axis_index("program"), lax.axis_index(axis)
    mine = pl.ds(me * heads, heads)

    def send(peer: jax.Array) -> None:
        there: Any = {axis: peer}
        pl.semaphore_signal(ready.at[me], 1, device_id=there)
        pl.semaphore_wait(ready.at[peer], 1)
        target = plgpu.remote_ref(q, peer)

        @pl.loop(0, lax.div(counts[peer] - program + PROGRAMS - 1, PROGRAMS))
        def _row(i: jax.Array) -> None:
            place = program + i * PROGRAMS
            row = rows[peer, place]
            plgpu.wait_smem_to_gmem(0)  # the last row's have left
            for buffer, (part, first, width) in zip(buffers, pieces, strict=True):
                plgpu.copy_gmem_to_smem(parts[part].at[row, :, pl.ds(first, width)], buffer, here)
            plgpu.barrier_wait(here)
            for buffer, (part, first, width) in zip(buffers, pieces, strict=True):
                columns = pl.ds(sum(widths[:part]) + first, width)
                plgpu.copy_smem_to_gmem(buffer, target.at[place, mine, columns])

        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(done, 1, device_id=there)

    # A copy's target is encoded on the host, so a peer must be a static number of hops away: one branch for each.
    for distance in range(ranks):
        pl.when(hop == distance)(functools.partial(send, lax.rem(me + distance, ranks)))

    @pl.when((hop == 0) & (program == 0))
    def _() -> None:
        pl.semaphore_wait(done, ranks * PROGRAMS)
