"""Entry point of the op: shapes, and which implementation serves them.

Letters: B rows, H heads, D latent + rotary width, V latent width, W pages per row, P pages, K tokens per page.
"""

from functools import partial
from typing import Any

import jax

from pallas_kernels.checks import check_latents, check_pages, check_queries, indices, within_table
from pallas_kernels.chip import CHIPS, known_chip, target_chip
from pallas_kernels.formats import is_fp8
from pallas_kernels.mla_decode import blackwell, hopper, ref, triton
from pallas_kernels.mla_decode.tuning import CONFIGS, config_for
from pallas_kernels.mla_decode.work import Work
from pallas_kernels.select import run_first

IMPLEMENTATIONS = {
    "blackwell": blackwell.decode,
    "hopper": hopper.decode,
    "triton": triton.decode,
    "ref": ref.decode,
}


def mla_decode(
    q: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    held: jax.Array,
    *,
    value_width: int,
    backend: str | None = None,
    chip: str | None = None,
    config: Any = None,
    work: Work | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one absorbed query row per request over all the tokens of it that are held here.

    Args:
      q: [B, H, D], absorbed and scaled.
      pool: [P, K, D], rows whose first V columns are the values too; or u8[P, K, bytes], FP8 rows as `pack_fp8` makes
        them (656 bytes for 512 + 64). Pages and slots beyond `held` are never read as numbers: they may hold NaN.
      pages: i32[B, W]: token t of row b lies in page pages[b, t // K], slot t % K. Beyond `held` any number may stand.
      held: i32[B]: tokens of each row, W * K at most; 0 or less for padding.
      value_width: V.
      backend: one of IMPLEMENTATIONS; None takes the first of `order_of` that accepts.
      chip: a key of CHIPS that the program is compiled for; None is the default device's. "ref" where that is none.
      config: the backend's configuration; None is the tuning table's.
      work: what `plan_decode` made of `held`, for the same configuration; None makes it here. So does a backend that
        serves in the place of the one that it was cut for.
      interpret: run the kernel without a GPU, slowly. Mosaic GPU's warpgroups wait for each other in threads of XLA's,
        of which a small machine has too few: set NPROC=32 in the environment before JAX starts.

    Returns f32[B, H, V] and its log-sum-exp, base e, f32[B, H]; (0, -inf) for a row that holds nothing.
    Raises ValueError for shapes that contradict each other, NotImplementedError where the named backend refuses.
    """
    pages, held = indices(pages=pages, held=held)
    _check(q, pool, pages, held, value_width)
    held = within_table(held, pool, pages)
    if work is not None and work.first.shape[0] != q.shape[0] + 1:
        raise ValueError(f"work was cut for {work.first.shape[0] - 1} rows, but there are {q.shape[0]} queries.")
    target = target_chip(chip)

    def gpu(kernel: Any, name: str) -> Any:
        def call(*args: Any) -> tuple[jax.Array, jax.Array]:
            chosen = config or config_for(known_chip(target, name), name, _rows(pool), q.shape[1])
            if not isinstance(chosen, CONFIGS[name]):
                told = f"{name} takes a {CONFIGS[name].__name__}, not a {type(chosen).__name__}"
                raise NotImplementedError(told) if backend is None else ValueError(f"{told}.")
            cut = work
            if work is not None and work.cut != chosen.cut:
                if backend is not None:
                    told = f"work was cut in {work.cut}, but {name} takes {chosen.cut} here"
                    raise ValueError(f"{told}: plan it with the same arguments.")
                cut = None  # planned for a backend that refused
            return kernel(*args, value_width=value_width, config=chosen, work=cut, interpret=interpret)

        return call

    implementations = {
        name: (lambda *args: ref.decode(*args, value_width=value_width)) if name == "ref" else gpu(kernel, name)
        for name, kernel in IMPLEMENTATIONS.items()
    }
    order = order_of(target, q.shape[1], fp8=is_fp8(pool))
    return run_first("mla_decode", implementations, order, backend)(q, pool, pages, held)


def order_of(chip: str | None, heads: int, *, fp8: bool = False) -> tuple[str, ...]:
    """Which backends are asked, in turn. Where no GPU of CHIPS is: the reference.

    The Hopper kernel always takes 64 heads at a time. A quarter full it spends two thirds as long on them as its BF16
    rows take to come, and Triton's two programs a multiprocessor have four times as much under way. Above that its
    warpgroups overlap what Triton's programs do one after another, the conversion of FP8 rows too.

    The Blackwell kernel takes 128 heads at a time: the lanes of tensor memory. For 64 it would spend 3,328 clocks of an
    SM's products on 64 tokens, whose BF16 rows take 2,640 to come; a block of 64 heads in Triton spends 1,600. FP8 rows
    are made BF16 once by each program of its pair, as often as by Triton's two blocks of 64 heads, whose account leaves
    that out. Counted for both, or for neither, the pair ends sooner: side by side it does what Triton does in turns.
    """
    if chip is None:
        return ("ref",)
    capability = CHIPS[chip].capability
    if capability == (9, 0) and heads > 16:
        return "hopper", "triton", "ref"
    if capability == (10, 0) and heads > 64:
        return "blackwell", "triton", "ref"
    return "triton", "ref"


def plan_decode(held: Any, *, heads: int, fp8: bool, backend: str | None = None, chip: str | None = None) -> Work:
    """Cut i32[B] histories, of numpy or JAX, into work for `mla_decode` with so many heads per rank: once per step.

    For `backend`, or the first in turn that has a configuration. Raises NotImplementedError where none has, and
    ValueError where it is not known for which GPU.
    """
    target, rows = known_chip(target_chip(chip), backend or "plan_decode"), "fp8" if fp8 else "plain"

    def plan(name: str) -> Work:
        return config_for(target, name, rows, heads).plan(held)

    order = [name for name in order_of(target, heads, fp8=fp8) if name != "ref"]
    planners = {name: partial(plan, name) for name in IMPLEMENTATIONS if name != "ref"}
    return run_first("plan_decode", planners, order, backend)()


def fits(work: Work, *, heads: int, fp8: bool, backend: str, chip: str) -> bool:
    """Whether `work` was cut as the backend of this chip takes it."""
    return work.cut == config_for(chip, backend, "fp8" if fp8 else "plain", heads).cut


def _rows(pool: jax.Array) -> str:
    return "fp8" if is_fp8(pool) else "plain"


def _check(q: jax.Array, pool: jax.Array, pages: jax.Array, held: jax.Array, value_width: int) -> None:
    B, H, D = q.shape
    check_queries(B, H)
    check_latents(pool, D, value_width)
    check_pages(pool, pages)
    if pages.shape[0] != B or held.shape != (B,):
        raise ValueError(f"{B} query rows, but pages of {pages.shape[0]} and lengths of {held.shape[0]} rows.")
