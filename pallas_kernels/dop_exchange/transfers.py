"""How a packed message crosses: by which collective, and the rule that says which."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def padded(send: jax.Array, counts: jax.Array, axis: str) -> jax.Array:
    """[T * C, words] with C places for each rank, all of them sent; [T * C, words] with C places from each rank.

    The only one that a compiler can put beside compute, and the only one on CPU.
    """
    del counts
    return jax.lax.all_to_all(send, axis, split_axis=0, concat_axis=0, tiled=True)


def ragged(send: jax.Array, counts: jax.Array, axis: str) -> jax.Array:
    """As `padded`, of which only the first `counts` places for each rank are sent; the others arrive as zero.

    `counts` i32[T] is the same on every sender: the rows that each rank owns. GPUs only.
    """
    ranks = counts.shape[0]
    capacity = send.shape[0] // ranks
    me = jax.lax.axis_index(axis)
    starts = jnp.arange(ranks, dtype=jnp.int32) * capacity
    here = jnp.full((ranks,), me * capacity, jnp.int32)
    mine = jnp.broadcast_to(counts[me], (ranks,))
    return jax.lax.ragged_all_to_all(send, jnp.zeros_like(send), starts, counts, here, mine, axis_name=axis)


def ragged_back(send: jax.Array, counts: jax.Array, axis: str) -> jax.Array:
    """The way back: each rank sends its own `counts` places to every rank, and receives each rank's."""
    ranks = counts.shape[0]
    capacity = send.shape[0] // ranks
    me = jax.lax.axis_index(axis)
    starts = jnp.arange(ranks, dtype=jnp.int32) * capacity
    here = jnp.full((ranks,), me * capacity, jnp.int32)
    mine = jnp.broadcast_to(counts[me], (ranks,))
    return jax.lax.ragged_all_to_all(send, jnp.zeros_like(send), starts, mine, here, counts, axis_name=axis)


Transfer = Callable[[jax.Array, jax.Array, str], jax.Array]
TRANSFERS: dict[str, tuple[Transfer, Transfer]] = {"padded": (padded, padded), "ragged": (ragged, ragged_back)}


def transfer_seconds(
    *, rows: int, capacity: int, ranks: int, row_bytes: int, bytes_per_s: float, latency_s: float
) -> dict[str, float]:
    """What each transfer takes by the cost rule, in seconds, for `rows` rows dealt evenly.

    Args:
      row_bytes: of one row's local heads.
      bytes_per_s: received by a rank.
      latency_s: of a collective without payload. The ragged one first exchanges where things go, so it has two; the
        remote one has its two handshakes, a store and a wait each, and is counted as one.
    """
    padded_s, exact_s = ((ranks - 1) * places * row_bytes / bytes_per_s for places in (capacity, -(-rows // ranks)))
    return {
        "padded": latency_s + padded_s,
        "ragged": 2 * latency_s + exact_s,
        "remote": latency_s + exact_s,
    }


def choose_transfer(
    seconds: dict[str, float], *, platform: str, beside_compute: bool = False, reachable: bool = False
) -> str:
    """The quickest of `transfer_seconds`; "padded" on CPU, and wherever compute is to run beside it.

    "remote" only where ranks are `reachable`: can store into each other's memory, as GPUs of one process can.
    """
    if platform == "cpu" or beside_compute:
        return "padded"
    return min((name for name in seconds if reachable or name != "remote"), key=lambda name: (seconds[name], name))
