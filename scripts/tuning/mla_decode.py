"""`mla_decode` over DeepSeek-V3's rows."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chip import CHIPS
from pallas_kernels.compiled import KernelFacts
from pallas_kernels.mla_decode import BlackwellConfig, HopperConfig, TritonConfig, mla_decode
from pallas_kernels.mla_decode.account import account
from splash_jax.preflight.kernels import compile_kernels
from tuning.search import Point, entry, fitting, limits, told_of, waits_least

LENGTHS = [4096] * 64  # tokens of each row that the account is asked about
WIDTH, LATENT = 576, 512  # of DeepSeek-V3's rows
MADE: dict[str, Any] = {"blackwell": BlackwellConfig, "hopper": HopperConfig, "triton": TritonConfig}


def points(chip: str) -> Iterator[Point]:
    """Heads per rank; the Hopper kernel takes 64 at a time, the Blackwell kernel 128."""
    for rows, heads in product(("plain", "fp8"), (16, 32, 64, 128)):
        yield Point("triton", rows, heads)
    if CHIPS[chip].capability == (9, 0):
        for rows, heads in product(("plain", "fp8"), (64, 128)):
            yield Point("hopper", rows, heads)
    if CHIPS[chip].capability == (10, 0):
        for rows in ("plain", "fp8"):
            yield Point("blackwell", rows, 128)


def candidates(backend: str, heads: int) -> Iterator[dict[str, int]]:
    """Configurations without `workers`, which follow from what the compiler makes of them."""
    if backend == "hopper":
        yield {"stages": 2}
        return
    if backend == "blackwell":  # its order of products keeps three blocks; tiles take the shared memory that is left
        yield {"stages": 3, "tiles": 8}
        return
    blocks = sorted({min(heads, block) for block in (32, 64)})
    for block, tokens, warps, stages in product(blocks, (16, 32, 64), (4, 8), (2, 3)):
        yield {"block_heads": block, "block_tokens": tokens, "warps": warps, "stages": stages}


def compiled(chip: str, backend: str, rows: str, heads: int, config: dict[str, int]) -> dict[str, KernelFacts]:
    """The kernels of a decode over DeepSeek-V3's rows in pages of 64."""
    fp8 = rows == "fp8"
    pool = jax.ShapeDtypeStruct((1000, 64, 656 if fp8 else WIDTH), jnp.uint8 if fp8 else jnp.bfloat16)
    q = jax.ShapeDtypeStruct((8, heads, WIDTH), jnp.bfloat16)
    pages, held = jax.ShapeDtypeStruct((8, 128), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    made = MADE[backend](workers=CHIPS[chip].sms, **config)
    decode = partial(mla_decode, value_width=LATENT, backend=backend, chip=chip, config=made)
    return compile_kernels(chip, decode, q, pool, pages, held)


def entry_of(chip: str, backend: str, rows: str, heads: int, config: dict[str, int]) -> dict[str, Any] | None:
    """The table's entry for a configuration; None where no block of it fits on a multiprocessor."""
    kernels = fitting(partial(compiled, chip, backend, rows, heads, config))
    if kernels is None:
        return None
    own, made, fp8 = backend != "triton", MADE[backend](workers=1, **config), rows == "fp8"
    facts = kernels[f"mla_decode_{backend}" + "_fp8" * fp8 if own else "mla_decode_items"]
    if backend == "blackwell":
        smem, programs = made.smem_bytes(LATENT), 2 * -(-heads // 128)  # halves of the latent's columns
    else:
        smem = made.smem_bytes(WIDTH) if own else facts.smem
        programs = max(1, heads // config.get("block_heads", 64))
    told = told_of(chip, facts, smem)
    if told is None:
        return None
    workers = told["blocks_per_sm"] * CHIPS[chip].sms // programs
    return entry(Point(backend, rows, heads), config | {"workers": workers}, told)


def expected_s(chip: str, entry: dict[str, Any]) -> float:
    """Seconds that the account expects at the chip's published limits."""
    how: dict[str, Any] = {"latent": LATENT, "rotary": WIDTH - LATENT, "chip": chip, "entry": entry} | limits(chip)
    return account(LENGTHS, heads=entry["heads"], **how).expected_s


def in_hand(entry: dict[str, Any]) -> tuple[float, ...]:
    """See `waits_least`; kernels other than Triton's have one candidate."""
    return waits_least(entry, entry["config"].get("block_heads", 64), entry["config"].get("block_tokens", 64))
