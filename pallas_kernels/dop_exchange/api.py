"""Entry points of the op: queries' local heads to their rows' owners, and outputs back, inside `jax.shard_map`.

Letters: N rows of a step, T ranks, C places of an owner, h heads per rank (H = T h), D columns of a head.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.chip import this_chip
from pallas_kernels.dop_exchange import ref, remote, triton
from pallas_kernels.dop_exchange.routing import Routing
from pallas_kernels.dop_exchange.transfers import TRANSFERS
from pallas_kernels.page_move import GATHERS
from pallas_kernels.select import run_first_with
from pallas_kernels.words import as_lines, from_lines, word_bytes

PACKS: dict[str, Callable[..., jax.Array]] = {"triton": triton.pack, "ref": ref.pack}


def heads_to_owners(
    parts: tuple[jax.Array, ...],
    routing: Routing,
    *,
    axis: str,
    transfer: str = "padded",
    backend: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """All heads of the rows that this rank owns, from the local heads of all rows that every rank has.

    Args:
      parts: arrays [N, h, width] of one dtype: a head's no-position and rotary columns, say. They cross as one message.
      routing: of the N rows, the same on every rank.
      transfer: one of TRANSFERS, or "remote", the one kernel that stores into the peers' memory (of Hopper and newer
        GPUs; places without a row then hold anything); `choose_transfer` has a rule.
      backend: of the kernels that pack and unpack, "triton" or "ref"; None takes the first that accepts on this device.

    Returns [C, H, sum of widths], heads in the ranks' order; zero at places without a row.
    Raises ValueError for parts that do not fit together and for a transfer that is not there.
    """
    heads, dtype = _check(parts, routing)
    if transfer == "remote":
        return remote.heads_to_owners(parts, routing, axis=axis)
    ranks, capacity = routing.rows.shape
    word = word_bytes(*(part.shape[2] * dtype.itemsize for part in parts))
    lines = tuple(as_lines(part, lead=2, word=word) for part in parts)
    packed = _kernel("pack", PACKS, backend, interpret)(lines, routing.rows.reshape(-1))
    came = _transfer(transfer)[0](packed.reshape(ranks * capacity, -1), routing.counts, axis)
    # A line is one row's heads of one rank: [rank, place] as they came, [place, rank] as the kernel reads them.
    order = jnp.arange(ranks * capacity, dtype=jnp.int32).reshape(ranks, capacity).T.reshape(-1)
    turned = _kernel("gather", GATHERS, backend, interpret)(came, order)
    return from_lines(turned, (capacity, ranks * heads, sum(part.shape[2] for part in parts)), dtype)


def owners_to_heads(
    out: jax.Array,
    routing: Routing,
    *,
    axis: str,
    transfer: str = "padded",
    backend: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The way back: [C, H, D] of the rows that this rank owns to its heads of all rows, [N, h, D]; zero for padding.

    Arguments and errors as for `heads_to_owners`.
    """
    ranks, capacity = routing.rows.shape
    if out.shape[0] != capacity or out.shape[1] % ranks:
        raise ValueError(f"outputs {list(out.shape)} are not of {capacity} places and heads of {ranks} ranks.")
    heads, gather = out.shape[1] // ranks, _kernel("gather", GATHERS, backend, interpret)
    lines = as_lines(out.reshape(capacity * ranks, heads, -1))
    order = jnp.arange(ranks * capacity, dtype=jnp.int32).reshape(capacity, ranks).T.reshape(-1)
    came = _transfer(transfer)[1](gather(lines, order), routing.counts, axis)
    return from_lines(gather(came, routing.places), (*routing.places.shape, heads, out.shape[2]), out.dtype)


def _check(parts: tuple[jax.Array, ...], routing: Routing) -> tuple[int, jnp.dtype]:
    lead, dtype = parts[0].shape[:2], parts[0].dtype
    if any(part.shape[:2] != lead or part.dtype != dtype for part in parts):
        found = ", ".join(f"{part.dtype}{list(part.shape)}" for part in parts)
        raise ValueError(f"parts of one message have the same rows, heads and dtype, unlike {found}.")
    if lead[0] != routing.places.shape[0]:
        raise ValueError(f"{lead[0]} rows, but a routing of {routing.places.shape[0]}.")
    return lead[1], dtype


def _transfer(name: str) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    if name not in TRANSFERS:
        raise ValueError(
            f"dop_exchange has no transfer {name!r}; it has: {', '.join(TRANSFERS)}, and to owners remote."
        )
    return TRANSFERS[name]


def _kernel(
    op: str, implementations: dict[str, Callable[..., jax.Array]], backend: str | None, interpret: bool
) -> Callable[..., jax.Array]:
    order = ("triton", "ref") if this_chip() else ("ref",)
    return run_first_with(f"dop_exchange's {op}", implementations, order, backend, interpret=interpret)
