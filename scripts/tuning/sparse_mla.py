"""`sparse_mla` over DeepSeek-V3.2's rows and lists."""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chip import CHIPS
from pallas_kernels.compiled import KernelFacts
from pallas_kernels.mla_decode import TritonConfig
from pallas_kernels.sparse_mla import sparse_mla
from pallas_kernels.sparse_mla.account import account
from splash_jax.preflight.kernels import compile_kernels
from tuning.search import Point, entry, fitting, limits, told_of, waits_least

WIDTH, LATENT, TOP = 576, 512, 2048  # of DeepSeek-V3.2's rows, and tokens of a list
DECODES, PROMPT_ROWS, PROMPT = [TOP] * 128, [TOP] * 256, 32768  # lists that the accounts are asked about
# Block of heads, block of tokens, warps, stages.
BLOCKS = {
    16: [(16, 64, 4, 3), (16, 32, 4, 3), (16, 64, 8, 3)],
    32: [(32, 64, 4, 3), (32, 32, 8, 3), (32, 64, 8, 3), (32, 16, 4, 3)],
    64: [(32, 64, 4, 3), (32, 32, 8, 3), (32, 16, 4, 3), (64, 16, 8, 3), (64, 32, 8, 3), (64, 64, 8, 2)],
}


def points(chip: str) -> Iterator[Point]:
    """Heads per rank."""
    for rows in ("plain", "fp8"):
        for heads in (16, 32, 64, 128):
            yield Point("triton", rows, heads)


def candidates(backend: str, heads: int) -> Iterator[dict[str, int]]:
    """Configurations without `workers`, which follow from what the compiler makes of them."""
    for block in BLOCKS[min(heads, 64)]:
        yield dict(zip(("block_heads", "block_tokens", "warps", "stages"), block, strict=True))


@cache
def compiled(chip: str, rows: str, config: tuple[tuple[str, int], ...]) -> dict[str, KernelFacts] | None:
    """The kernels of one block of heads, in pages of 64; None where no block fits."""
    made = TritonConfig(workers=CHIPS[chip].sms, **dict(config))
    fp8 = rows == "fp8"
    pool = jax.ShapeDtypeStruct((1000, 64, 656 if fp8 else WIDTH), jnp.uint8 if fp8 else jnp.bfloat16)
    q = jax.ShapeDtypeStruct((8, made.block_heads, WIDTH), jnp.bfloat16)
    lists = jax.ShapeDtypeStruct((8, TOP), jnp.int32), jax.ShapeDtypeStruct((8, 128), jnp.int32)
    attend = partial(sparse_mla, value_width=LATENT, backend="triton", config=made)
    return fitting(partial(compile_kernels, chip, attend, q, pool, *lists))


def entry_of(chip: str, backend: str, rows: str, heads: int, config: dict[str, int]) -> dict[str, Any] | None:
    """The table's entry for a configuration; None where no block of it fits on a multiprocessor."""
    kernels = compiled(chip, rows, tuple(config.items()))
    told = told_of(chip, kernels["sparse_mla_items"]) if kernels else None
    if told is None:
        return None
    workers = told["blocks_per_sm"] * CHIPS[chip].sms // max(1, heads // config["block_heads"])
    return entry(Point(backend, rows, heads), config | {"workers": workers}, told)


def expected_s(chip: str, entry: dict[str, Any]) -> float:
    """Of attention over `DECODES` and over `PROMPT_ROWS`, together."""
    how: dict[str, Any] = {"heads": entry["heads"], "latent": LATENT, "rotary": WIDTH - LATENT} | limits(chip)
    how |= {"chip": chip, "entry": entry}
    return account(DECODES, **how).expected_s + account(PROMPT_ROWS, distinct=PROMPT, **how).expected_s


def in_hand(entry: dict[str, Any]) -> tuple[float, ...]:
    """See `waits_least`."""
    return waits_least(entry, entry["config"]["block_heads"], entry["config"]["block_tokens"])
