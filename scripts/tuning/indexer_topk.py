"""`indexer_topk` of DeepSeek-V3.2: logits and selection, tuned together."""

from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chip import CHIPS
from pallas_kernels.indexer_topk import LogitsConfig, SelectConfig, top_k, triton
from pallas_kernels.indexer_topk.account import account_logits, account_select
from splash_jax.preflight.kernels import compile_kernels
from tuning.search import Point, entry, limits, parts_of, told_of

HEADS, WIDTH, TOP = 64, 128, 2048  # of DeepSeek-V3.2's index
PROMPT, TILE = [32768] * 1024, 16  # tokens of each row that the accounts are asked about; rows of one sequence
# Block of tokens, query rows that share a key, warps, stages.
LOGITS = [(128, 2, 4, 3), (128, 2, 8, 3), (64, 2, 4, 3)]
# Block, chunk, warps.
SELECTS = [(2048, 32768, 8), (4096, 32768, 8), (4096, 32768, 16)]


def points(chip: str) -> Iterator[Point]:
    """The table's heads are index heads."""
    for rows in ("plain", "fp8"):
        yield Point("triton", rows, HEADS)


def candidates(backend: str, heads: int) -> Iterator[dict[str, dict[str, int]]]:
    """Configurations without `fp8_products`, which follow from rows and chip."""
    for (tokens, shared, warps, stages), select in product(LOGITS, SELECTS):
        logits = {"block_tokens": tokens, "blocks": 1024 // tokens, "rows": shared, "warps": warps, "stages": stages}
        yield {"logits": logits, "select": dict(zip(("block", "chunk", "warps"), select, strict=True))}


@cache
def logits_told(chip: str, rows: str, config: LogitsConfig, tile: int) -> dict[str, Any] | None:
    """Of 64 rows, every `tile` of one sequence of 32,768 tokens in pages of 64."""
    fp8 = rows == "fp8"
    pool = struct(1000, 64, WIDTH + 4, dtype=jnp.uint8) if fp8 else struct(1000, 64, WIDTH, dtype=jnp.bfloat16)
    q = struct(64, HEADS, WIDTH, dtype=jnp.float8_e4m3fn if fp8 else jnp.bfloat16)
    weights, lengths = struct(64, HEADS, dtype=jnp.float32), struct(64, dtype=jnp.int32)
    pages = struct(64 // tile, 512, dtype=jnp.int32)
    kernels = compile_kernels(chip, partial(triton.logits, config=config), q, weights, pool, pages, lengths)
    return told_of(chip, kernels["indexer_topk_logits"])


@cache
def select_told(chip: str, config: SelectConfig) -> dict[str, dict[str, Any] | None]:
    """Of both launches of a selection from rows of 131,072."""
    choose = partial(top_k, k=TOP, backend="triton", config=config)
    kernels = compile_kernels(chip, choose, struct(64, 131072, dtype=jnp.float32), struct(64, dtype=jnp.int32))
    return {part: told_of(chip, kernels[f"indexer_topk_{part}"]) for part in ("select", "merge")}


def entry_of(chip: str, backend: str, rows: str, heads: int, config: dict[str, Any]) -> dict[str, Any] | None:
    """The table's entry for a configuration; None where a kernel of it does not fit on a multiprocessor."""
    # Triton multiplies FP8 into float32 as it is where the tensor cores sum in float32: not on Hopper.
    own = {"fp8_products": rows == "fp8" and CHIPS[chip].capability >= (10, 0)}
    config = config | {"logits": config["logits"] | own}
    logits = LogitsConfig(**config["logits"])
    parts = {"logits": logits_told(chip, rows, logits, TILE), "logits_decode": logits_told(chip, rows, logits, 1)}
    parts |= select_told(chip, SelectConfig(**config["select"]))
    if not all(parts.values()):
        return None
    return entry(Point(backend, rows, heads), config, parts)


def expected_s(chip: str, entry: dict[str, Any]) -> float:
    """Of the logits of `PROMPT` and the selection among them, together."""
    how: dict[str, Any] = {"chip": chip, "entry": entry} | limits(chip)
    logits = account_logits(PROMPT, tile=TILE, heads=HEADS, width=WIDTH, **how).expected_s
    return logits + account_select(PROMPT, columns=PROMPT[0], k=TOP, **how).expected_s


def in_hand(entry: dict[str, Any]) -> tuple[float, ...]:
    """Logits and columns of the selection that a multiprocessor has in hand, then the fewest warps."""
    config, parts = entry["config"], parts_of(entry)
    logits, select = config["logits"], config["select"]
    return (
        logits["block_tokens"] * logits["rows"] * parts["logits"]["blocks_per_sm"],
        select["block"] * parts["select"]["blocks_per_sm"],
        -logits["warps"],
        -select["warps"],
    )


def struct(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """An array to compile for."""
    return jax.ShapeDtypeStruct(shape, dtype)
