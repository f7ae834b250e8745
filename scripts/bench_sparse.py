"""Sparse attention and the indexer, for `bench_kernels.py`: checked, timed, and what their accounts expect."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_timing import expectation, seconds_of, shares

from pallas_kernels.chip import this_chip
from pallas_kernels.indexer_topk import LogitsConfig, SelectConfig, indexer_topk, quantize_queries, ref, top_k, triton
from pallas_kernels.indexer_topk import TritonConfig as IndexerConfig
from pallas_kernels.indexer_topk import config_for as indexer_config_for
from pallas_kernels.indexer_topk.account import account_logits, account_select
from pallas_kernels.mla_decode import TritonConfig, pack_fp8
from pallas_kernels.sparse_mla import config_for, sparse_mla
from pallas_kernels.sparse_mla.account import account
from pallas_kernels.tuning import entry_for
from splash_jax.cost import load_hardware

PAGE = 64
WORST_ERROR = 0.05  # of attention, relative to 1 + |value|
WORST_LOGIT = 1e-3  # of the largest logit
FEW = 4  # rows that the references, which gather whole lists and histories, have room for


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`rows` queries, every `tile` of one sequence of `context` tokens, that choose `k` of them."""

    rows: int
    tile: int
    context: int
    k: int
    heads: int  # of attention, or of the indexer
    fp8: bool
    latent: int = 512
    rotary: int = 64
    width: int = 128  # of an index head

    def pages(self) -> np.ndarray:
        """i32[sequences, pages]: every sequence its own, in any order."""
        sequences, each = self.rows // self.tile, -(-self.context // PAGE)
        return np.random.default_rng(0).permutation(sequences * each).reshape(sequences, each).astype(np.int32)

    def told(self) -> str:
        """The shape in a table's cell."""
        kind = "decodes" if self.tile == 1 else "prompt rows"
        return f"{self.rows} {kind}, {self.k} of {self.context}, {self.heads} heads, {'FP8' if self.fp8 else 'BF16'}"


ATTENTION = [
    Shape(rows=128, tile=1, context=16384, k=2048, heads=128, fp8=True),
    Shape(rows=128, tile=1, context=16384, k=2048, heads=16, fp8=True),
    Shape(rows=1024, tile=1024, context=32768, k=2048, heads=128, fp8=False),
]
INDEXER = [
    Shape(rows=64, tile=1, context=65536, k=2048, heads=64, fp8=True),
    Shape(rows=4, tile=1, context=131072, k=2048, heads=64, fp8=True),
    Shape(rows=1024, tile=1024, context=32768, k=2048, heads=64, fp8=True),
]
DRY_ATTENTION = [Shape(rows=4, tile=2, context=70, k=20, heads=16, fp8=True, latent=128, rotary=16)]
DRY_INDEXER = [Shape(rows=4, tile=2, context=70, k=20, heads=2, fp8=True)]
SPARSE_ROWS = len(ATTENTION) + 3 * len(INDEXER)


def sparse_rows(limits: dict[str, float], dry: bool, budget_s: float) -> Iterator[dict[str, Any]]:
    """One row per shape of attention, three per shape of the indexer."""
    for shape in DRY_ATTENTION if dry else ATTENTION:
        yield attention_row(shape, limits, dry, budget_s)
    for shape in DRY_INDEXER if dry else INDEXER:
        yield from indexer_rows(shape, limits, dry, budget_s)


def attention_row(shape: Shape, limits: dict[str, float], dry: bool, budget_s: float) -> dict[str, Any]:
    """Random lists of positions, in ascending order."""
    rng, pages, columns = np.random.default_rng(1), shape.pages(), shape.latent + shape.rotary
    selected = np.sort([rng.permutation(shape.context)[: shape.k] for _ in range(shape.rows)], 1).astype(np.int32)
    make = jax.jit(lambda key: jax.random.normal(key, (pages.size, PAGE, columns), jnp.bfloat16))
    pools = [make(jax.random.key(i)) for i in range(2)]
    if shape.fp8:
        pools = [jax.jit(partial(pack_fp8, latent=shape.latent))(pool) for pool in pools]
    q = jax.random.normal(jax.random.key(9), (shape.rows, shape.heads, columns), jnp.bfloat16) * columns**-0.5
    chip, rows = this_chip(), "fp8" if shape.fp8 else "plain"
    config = (
        TritonConfig(block_heads=16, block_tokens=16, warps=4, stages=2, workers=2)
        if dry or chip is None
        else config_for(chip.name, rows, shape.heads)
    )
    how: dict[str, Any] = {"value_width": shape.latent}
    attend = jax.jit(partial(sparse_mla, backend="triton", config=config, interpret=dry, **how))
    got = attend(q, pools[0], selected, pages)
    few = min(FEW, shape.tile) if shape.tile > 1 else FEW
    own = pages[: max(1, few // shape.tile)]
    want = jax.jit(partial(sparse_mla, backend="ref", **how))(q[:few], pools[0], selected[:few], own)
    error = max(float(jnp.max(jnp.abs(g[:few] - w) / (1 + jnp.abs(w)))) for g, w in zip(got, want, strict=True))
    took = seconds_of([partial(attend, q, pool, selected, pages) for pool in pools], budget_s)
    tokens, row_bytes = shape.rows * shape.k, pools[0].shape[-1] * pools[0].dtype.itemsize
    row = {"kernel": "sparse_mla triton", "shape": shape.told(), "seconds": took, "error": error}
    row |= {"ok": error <= WORST_ERROR, "bytes": tokens * row_bytes}
    row |= {"flops": 2 * shape.heads * tokens * (columns + shape.latent)}
    if chip is not None:
        row["expected_seconds"] = attention_account(shape, chip.name).expected_s
    return shares(row, limits)


def indexer_rows(shape: Shape, limits: dict[str, float], dry: bool, budget_s: float) -> Iterator[dict[str, Any]]:
    """The whole op; its selection alone; and XLA's, which it has to beat."""
    pages, J, C = shape.pages(), shape.heads, shape.width
    make = jax.jit(lambda key: jax.random.normal(key, (pages.size, PAGE, C), jnp.bfloat16))
    pools = [make(jax.random.key(i)) for i in range(2)]
    q = jax.random.normal(jax.random.key(9), (shape.rows, J, C), jnp.bfloat16)
    weights = jax.random.normal(jax.random.key(8), (shape.rows, J))
    if shape.fp8:
        pools = [jax.jit(partial(pack_fp8, latent=C))(pool) for pool in pools]
        q, weights = quantize_queries(q, weights)
    last = np.arange(shape.rows, dtype=np.int32) % shape.tile  # a prompt's last rows see the whole context
    lengths = shape.context - shape.tile + 1 + last
    chip, rows = this_chip(), "fp8" if shape.fp8 else "plain"
    config = (
        IndexerConfig(
            logits=LogitsConfig(block_tokens=16, blocks=2, rows=2, warps=4, stages=2, fp8_products=True),
            select=SelectConfig(block=32, chunk=64, warps=4),
        )
        if dry or chip is None
        else indexer_config_for(chip.name, rows, J)
    )
    logits = jax.jit(partial(triton.logits, config=config.logits, interpret=dry))
    found = logits(q, weights, pools[0], pages, lengths)
    few = min(FEW, shape.tile) if shape.tile > 1 else FEW
    own, seen = pages[: max(1, few // shape.tile)], np.arange(found.shape[1]) < lengths[:few, None]
    want = jax.jit(ref.logits)(q[:few], weights[:few], pools[0], own, lengths[:few])
    error = float(jnp.max(jnp.where(seen, jnp.abs(found[:few] - want), 0)) / jnp.max(jnp.abs(want)))

    select = jax.jit(partial(top_k, k=shape.k, backend="triton", config=config.select, interpret=dry))
    by_xla = jax.jit(partial(top_k, k=shape.k))
    same = bool((select(found, lengths)[:few] == by_xla(found[:few], lengths[:few])).all())
    whole = jax.jit(partial(indexer_topk, k=shape.k, backend="triton", config=config, interpret=dry))
    took = seconds_of([partial(whole, q, weights, pool, pages, lengths) for pool in pools], budget_s)
    total = int(lengths.sum())
    keys = pages.size * PAGE * pools[0].shape[-1] * pools[0].dtype.itemsize
    row = {"kernel": "indexer_topk triton", "shape": shape.told(), "seconds": took, "error": error}
    row |= {"ok": error <= WORST_LOGIT and same, "bytes": keys + 4 * total, "flops": 2 * J * C * total}
    selection = {"shape": f"{shape.k} of {shape.context}, {shape.rows} rows", "ok": same, "bytes": 4 * total}
    selection |= {"kernel": "indexer_topk select", "seconds": seconds_of([partial(select, found, lengths)], budget_s)}
    if chip is not None:
        first, second = indexer_accounts(shape, chip.name)
        row["expected_seconds"] = first.expected_s + second.expected_s
        selection["expected_seconds"] = second.expected_s
    yield shares(row, limits)
    yield shares(selection, limits)
    other = seconds_of([partial(by_xla, found, lengths)], budget_s)
    yield shares(selection | {"kernel": "jax.lax.top_k, sorted", "seconds": other, "ok": True}, limits)


def chip_limits(chip: str) -> dict[str, Any]:
    """What accounts ask of a chip, as published."""
    hardware = load_hardware(chip)
    return {"chip": chip, "bytes_per_s": hardware.hbm_bytes_per_s, "flops_per_s": hardware.bf16_flops_per_s}


def attention_account(shape: Shape, chip: str) -> Any:
    """Of a shape; a prompt's rows share its tokens."""
    entry = entry_for("sparse_mla", chip, "triton", "fp8" if shape.fp8 else "plain", shape.heads)
    return account(
        [shape.k] * shape.rows, heads=shape.heads, latent=shape.latent, rotary=shape.rotary, entry=entry,
        distinct=None if shape.tile == 1 else shape.rows // shape.tile * shape.context, **chip_limits(chip),
    )  # fmt: skip


def indexer_accounts(shape: Shape, chip: str) -> tuple[Any, Any]:
    """Of a shape's logits and of its selection."""
    entry = entry_for("indexer_topk", chip, "triton", "fp8" if shape.fp8 else "plain", shape.heads)
    lengths = [shape.context] * shape.rows
    how: dict[str, Any] = {"entry": entry} | chip_limits(chip)
    return (
        account_logits(lengths, tile=shape.tile, heads=shape.heads, width=shape.width, **how),
        account_select(lengths, columns=shape.context, k=shape.k, **how),
    )


def expected_sparse_lines(chip: str) -> Iterator[str]:
    """What the accounts expect of every shape on a chip, at its published limits."""
    for shape in ATTENTION:
        yield expectation("  sparse_mla", shape.told(), attention_account(shape, chip))
    for shape in INDEXER:
        logits, select = indexer_accounts(shape, chip)
        yield expectation("  indexer_topk logits", shape.told(), logits)
        yield expectation("  indexer_topk select", shape.told(), select)
