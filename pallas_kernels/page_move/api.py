"""Entry points of the op: pages by number, out of a pool, into it, and from rank to rank.

Letters: P pages of a pool, N slots. A page is whatever lies behind the leading dimension, of any dtype; it is moved as
bytes. A slot outside [0, P) stands for no page.
"""

from collections.abc import Callable

import jax

from pallas_kernels.checks import indices
from pallas_kernels.chip import this_chip
from pallas_kernels.page_move import ref, triton
from pallas_kernels.select import run_first_with
from pallas_kernels.words import as_lines, from_lines

GATHERS: dict[str, Callable[..., jax.Array]] = {"triton": triton.gather, "ref": ref.gather}
SCATTERS: dict[str, Callable[..., jax.Array]] = {"triton": triton.scatter, "ref": ref.scatter}


def gather_pages(
    pool: jax.Array, slots: jax.Array, *, backend: str | None = None, interpret: bool = False
) -> jax.Array:
    """Pages [N, ...] of pool [P, ...] at i32[N]; zero where a slot is no page. Raises ValueError for other slots."""
    (slots,) = indices(slots=slots)
    taken = _run("gather_pages", GATHERS, backend, interpret)(as_lines(pool), slots)
    return from_lines(taken, (slots.shape[0], *pool.shape[1:]), pool.dtype)


def scatter_pages(
    pool: jax.Array, slots: jax.Array, pages: jax.Array, *, backend: str | None = None, interpret: bool = False
) -> jax.Array:
    """The pool [P, ...] with pages [N, ...] at i32[N]; those whose slot is no page are dropped. No slot may come twice.

    Raises ValueError where the pages are not of the pool's form, or slots are no whole numbers.
    """
    (slots,) = indices(slots=slots)
    if pages.shape != (*slots.shape, *pool.shape[1:]) or pages.dtype != pool.dtype:
        raise ValueError(
            f"{slots.shape[0]} slots of a {pool.dtype} pool of pages {pool.shape[1:]} cannot take "
            f"{pages.dtype}{list(pages.shape)}."
        )
    written = _run("scatter_pages", SCATTERS, backend, interpret)(as_lines(pool), slots, as_lines(pages))
    return from_lines(written, pool.shape, pool.dtype)


def send_pages(
    old: jax.Array,
    new: jax.Array,
    read: jax.Array,
    write: jax.Array,
    *,
    axis: str | tuple[str, ...],
    chunks: int = 1,
    backend: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Pages of `old` on every rank to slots of `new` on others, inside `jax.shard_map` over `axis` of T ranks.

    Args:
      old, new: [P, ...] and [P', ...], pages alike. `new` may be `old` where no later chunk reads what an
        earlier one writes: always with one chunk.
      read: i32[T, S]: slots of `old` sent to each rank.
      write: i32[T, S]: where what comes from each rank goes in `new`.
      chunks: exchanges, one after another, that a move is cut into: buffers hold 1 / chunks of it at a time.

    Raises ValueError where S is no multiple of `chunks`, the pages are not alike, or slots are no whole numbers.
    """
    sends = read.shape[1]
    read, write = indices(read=read, write=write)
    if old.shape[1:] != new.shape[1:] or old.dtype != new.dtype or read.shape != write.shape:
        raise ValueError(
            f"pages {old.dtype}{list(old.shape[1:])} at {list(read.shape)} slots do not go to pages "
            f"{new.dtype}{list(new.shape[1:])} at {list(write.shape)}."
        )
    if not sends:
        return new
    if chunks < 1 or sends % chunks:
        raise ValueError(f"{sends} pages per rank cannot be sent in {chunks} equal chunks.")
    # As words all the way: XLA:CPU exchanges bfloat16 as float32, and that changes the bits of a NaN.
    gather = _run("gather_pages", GATHERS, backend, interpret)
    scatter = _run("scatter_pages", SCATTERS, backend, interpret)
    source, target = as_lines(old), as_lines(new)
    for chunk in range(chunks):
        part = slice(chunk * sends // chunks, (chunk + 1) * sends // chunks)
        taken = gather(source, read[:, part].reshape(-1))
        came = jax.lax.all_to_all(taken, axis, split_axis=0, concat_axis=0, tiled=True)
        target = scatter(target, write[:, part].reshape(-1), came)
        if chunks > 1:  # a later chunk's buffers are not filled while an earlier one's are in use
            source, target = jax.lax.optimization_barrier((source, target))
    return from_lines(target, new.shape, new.dtype)


def _run(
    op: str, implementations: dict[str, Callable[..., jax.Array]], backend: str | None, interpret: bool
) -> Callable[..., jax.Array]:
    order = ("triton", "ref") if this_chip() else ("ref",)
    return run_first_with(op, implementations, order, backend, interpret=interpret)
