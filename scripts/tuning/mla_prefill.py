"""`mla_prefill` over DeepSeek-V3's rows: the table's backends are the two forms, its heads the lines of `lines_of`."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chip import CHIPS
from pallas_kernels.compiled import KernelFacts
from pallas_kernels.mla_prefill import ExpandedConfig, TileConfig, mla_prefill
from pallas_kernels.mla_prefill.account import LINES, ROWS, Call, account
from splash_jax.preflight.kernels import compile_kernels
from tuning.search import Point, entry, fitting, limits, told_of, waits_least, warps_of

WIDTH, LATENT, NOPE, VALUE = 576, 512, 128, 128  # of DeepSeek-V3's rows, and of its heads
HEADS, TILE = 16, 32  # per rank, and rows of a tile of the absorbed form
CHUNK = 4096  # tokens whose keys the expanded form makes at once


def points(chip: str) -> Iterator[Point]:
    """Lines that fill a block of the absorbed form, and the rows of one head that may fill the expanded form's."""
    for rows in ("plain", "fp8"):
        yield Point("absorbed", rows, LINES)
    for tile in (64, ROWS):
        yield Point("expanded", "plain", tile)


def candidates(backend: str, heads: int) -> Iterator[dict[str, int]]:
    """Configurations without `workers`, which follow from what the compiler makes of them."""
    if backend == "expanded":
        for tokens, stages in product((64, 128), (2, 3)):
            own = {"block_rows": heads, "block_tokens": tokens, "warps": warps_of(heads), "stages": stages}
            yield own | {"chunk_tokens": CHUNK}
        return
    for block, tokens, warps, stages in product((32, 64), (16, 32, 64), (4, 8), (2, 3)):
        yield {"block_lines": block, "block_tokens": tokens, "warps": warps, "stages": stages}


def compiled(chip: str, backend: str, rows: str, heads: int, config: dict[str, int]) -> dict[str, KernelFacts]:
    """The kernels of tiles over rows in pages of 64: 64 tiles, or 8 of two sequences whose keys are made."""
    tile, tiles = (heads, 8) if backend == "expanded" else (TILE, 64)
    pool = struct(1000, 64, 656, dtype=jnp.uint8) if rows == "fp8" else struct(1000, 64, WIDTH)
    seen = struct(tiles * tile, dtype=jnp.int32)
    how: dict[str, Any] = {"tile": tile, "value_width": LATENT, "form": backend, "backend": "triton", "chip": chip}
    if backend == "absorbed":
        made: Any = TileConfig(workers=CHIPS[chip].sms, **config)
        prefill, pages = partial(mla_prefill, config=made, **how), struct(tiles, 128, dtype=jnp.int32)
        return compile_kernels(chip, prefill, struct(tiles * tile, HEADS, WIDTH), pool, pages, seen)

    def expand(q: Any, pool: Any, pages: Any, seen: Any, sequence: Any, w_uk: Any, w_uv: Any) -> Any:
        more: dict[str, Any] = {"sequence": sequence, "w_uk": w_uk, "w_uv": w_uv, "config": ExpandedConfig(**config)}
        return mla_prefill(q, pool, pages, seen, **more, **how)

    q, pages = struct(tiles * tile, HEADS, NOPE + WIDTH - LATENT), struct(2, 128, dtype=jnp.int32)
    weights = struct(HEADS, LATENT, NOPE), struct(HEADS, VALUE, LATENT)
    return compile_kernels(chip, expand, q, pool, pages, seen, struct(tiles, dtype=jnp.int32), *weights)


def entry_of(chip: str, backend: str, rows: str, heads: int, config: dict[str, int]) -> dict[str, Any] | None:
    """The table's entry for a configuration; None where no block of it fits on a multiprocessor."""
    kernels = fitting(partial(compiled, chip, backend, rows, heads, config))
    told = (
        told_of(chip, kernels["mla_prefill" if backend == "absorbed" else "mla_prefill_expanded"]) if kernels else None
    )
    if told is None:
        return None
    workers = {"workers": told["blocks_per_sm"] * CHIPS[chip].sms} if backend == "absorbed" else {}
    return entry(Point(backend, rows, heads), config | workers, told)


def expected_s(chip: str, entry: dict[str, Any]) -> float:
    """Of the last 2,048 rows of 16,384 tokens, in tiles of 128, or of as many rows as the entry is for."""
    call = Call(
        rows=2048, sequences=1, keys=16384, tile=entry["heads"] if entry["backend"] == "expanded" else ROWS,
        heads=HEADS, latent=LATENT, rotary=WIDTH - LATENT, nope=NOPE, value=VALUE, fp8=entry["rows"] == "fp8",
    )  # fmt: skip
    how: dict[str, Any] = {"chip": chip, "entry": entry} | limits(chip)
    return account(call, entry["backend"], **how).expected_s


def in_hand(entry: dict[str, Any]) -> tuple[float, ...]:
    """See `waits_least`."""
    config = entry["config"]
    return waits_least(entry, config.get("block_lines") or config["block_rows"], config["block_tokens"])


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An array to compile for."""
    return jax.ShapeDtypeStruct(shape, dtype)
