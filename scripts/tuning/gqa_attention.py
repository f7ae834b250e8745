"""`gqa_attention` over heads of 64 and 128 columns; the table's heads are the query lines of a key head in a tile."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chip import CHIPS
from pallas_kernels.compiled import KernelFacts
from pallas_kernels.gqa_attention import gqa_attention
from pallas_kernels.gqa_attention.account import account
from pallas_kernels.tiles import TileConfig
from splash_jax.preflight.kernels import compile_kernels
from tuning.search import Point, entry, fitting, limits, told_of, waits_least, warps_of

HEADS, GROUPS = 64, 8  # that the account is asked about
DECODES, PROMPTS, KEYS = 64, 4, 8192  # sequences, and tokens of each


def points(chip: str) -> Iterator[Point]:
    """A decode row's query heads fill at most 16 lines; tiles of a prompt fill a block of either size."""
    for width, lines in product((64, 128), (16, 64, 128)):
        yield Point("triton", f"bf16-{width}", lines)


def candidates(backend: str, heads: int) -> Iterator[dict[str, int]]:
    """Configurations without `workers`, which follow from what the compiler makes of them."""
    for tokens, stages in product((64, 128), (2, 3)):
        yield {"block_lines": heads, "block_tokens": tokens, "warps": warps_of(heads), "stages": stages}


def compiled(chip: str, rows: str, heads: int, config: dict[str, int]) -> dict[str, KernelFacts]:
    """The kernels of 64 tiles of 16 heads in 2 groups, over pages of 64: 8 lines of a decode, else of as many rows."""
    width, tile, tiles = width_of(rows), rows_of(heads), 64
    pool = jax.ShapeDtypeStruct((1000, 64, 2, width), jnp.bfloat16)
    pages, seen = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((tiles, 128), (tiles * tile,)))
    q = jax.ShapeDtypeStruct((tiles * tile, 16, width), jnp.bfloat16)
    made = TileConfig(workers=CHIPS[chip].sms, **config)
    attend = partial(gqa_attention, tile=tile, backend="triton", chip=chip, config=made)
    return compile_kernels(chip, attend, q, pool, pool, pages, seen)


def entry_of(chip: str, backend: str, rows: str, heads: int, config: dict[str, int]) -> dict[str, Any] | None:
    """The table's entry for a configuration; None where no block of it fits on a multiprocessor."""
    kernels = fitting(partial(compiled, chip, rows, heads, config))
    told = told_of(chip, kernels["gqa_attention"]) if kernels else None
    if told is None:
        return None
    workers = told["blocks_per_sm"] * CHIPS[chip].sms
    return entry(Point(backend, rows, heads), config | {"workers": workers}, told)


def expected_s(chip: str, entry: dict[str, Any]) -> float:
    """Of a decode under 64 heads in 8 groups, or of 512 rows of each of four prompts in tiles of the entry's lines."""
    tile = rows_of(entry["heads"])
    sequences, rows = (DECODES, 1) if tile == 1 else (PROMPTS, 512)
    how: dict[str, Any] = {"chip": chip, "entry": entry} | limits(chip)
    return account(
        tokens=sequences * KEYS, pairs=sequences * rows * (KEYS - (rows - 1) / 2), rows=sequences * rows, tile=tile,
        heads=HEADS, groups=GROUPS, width=width_of(entry["rows"]), **how,
    ).expected_s  # fmt: skip


def in_hand(entry: dict[str, Any]) -> tuple[float, ...]:
    """See `waits_least`."""
    return waits_least(entry, entry["config"]["block_lines"], entry["config"]["block_tokens"])


def rows_of(lines: int) -> int:
    """Rows of a tile whose groups of eight query heads have so many lines; one, which half fills them, below 64."""
    return lines * GROUPS // HEADS if lines >= 64 else 1


def width_of(rows: str) -> int:
    """Columns of a key head, in the table's words "bf16-64" and "bf16-128"."""
    return int(rows.removeprefix("bf16-"))
