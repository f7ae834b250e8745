"""What every op refuses, in tables: of arguments that contradict each other all ops say the same, and what no kernel of
an op can take is left to the next backend, never served wrongly. Nothing is computed: shapes say all of it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dop_exchange import PACKS
from pallas_kernels.gqa_attention import TileConfig, gqa_attention
from pallas_kernels.indexer_topk import LogitsConfig, SelectConfig, indexer_topk
from pallas_kernels.indexer_topk import TritonConfig as IndexerConfig
from pallas_kernels.launch import MOST_PROGRAMS, triton_call
from pallas_kernels.mla_attention import HeadWeights, PageTable, mla_attention
from pallas_kernels.mla_decode import TritonConfig, mla_decode
from pallas_kernels.mla_prefill import ExpandedConfig, mla_prefill
from pallas_kernels.page_move import gather_pages, scatter_pages
from pallas_kernels.sparse_mla import sparse_mla

H, K, W, P = 16, 64, 8, 100
BF16, FP8 = jnp.bfloat16, jnp.uint8


def struct(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(
    call: Callable[..., Any], rows: int = 64, sequences: int = 64, columns: int = 576, lengths: int = 64, **more: Any
) -> Any:
    """A function of changed sizes that asks what an attention op answers to `call(q, pool, pages, lengths)`."""

    def ask(
        rows: int = rows, sequences: int = sequences, lengths: int = lengths, heads: int = H, page: int = K,
        table: int = W, pages: int = P, dtype: Any = BF16, width: int | None = None, indices: Any = jnp.int32,
        columns: int = columns, **options: Any,
    ) -> Any:  # fmt: skip
        width = (columns + 80 if dtype == FP8 else columns) if width is None else width
        q, pool = struct((rows, heads, columns), BF16), struct((pages, page, width), dtype)
        tables = struct((sequences, table), indices), struct((lengths,), indices)
        return jax.eval_shape(partial(call, **more | options), q, pool, *tables)

    return ask


def by_heads(call: Callable[..., Any]) -> Callable[..., Any]:
    """With the weights that make keys and values, of 128 columns each, of latents."""

    def ask(q: Any, pool: Any, pages: Any, lengths: Any, value_width: int, **options: Any) -> Any:
        own = jnp.zeros((*q.shape[:2], 128 + q.shape[2] - value_width), q.dtype)
        w_uk, w_uv = (jnp.zeros((q.shape[1], *shape), BF16) for shape in ((value_width, 128), (128, value_width)))
        return call(own, pool, pages, lengths, w_uk=w_uk, w_uv=w_uv, value_width=value_width, **options)

    return ask


def selected(q: Any, pool: Any, pages: Any, lengths: Any, **options: Any) -> Any:
    return sparse_mla(q, pool, jnp.zeros((*lengths.shape, 2048), lengths.dtype), pages, **options)


def grouped(q: Any, pool: Any, pages: Any, lengths: Any, **options: Any) -> Any:
    """Two key heads."""
    keys = jnp.zeros((*pool.shape[:2], 2, pool.shape[2]), pool.dtype)
    return gqa_attention(q, keys, keys, pages, lengths, **options)


def indexed(q: Any, pool: Any, pages: Any, lengths: Any, **options: Any) -> Any:
    q = q.astype(jnp.float8_e4m3fn) if pool.dtype == FP8 else q
    return indexer_topk(q, jnp.zeros(q.shape[:2], jnp.float32), pool, pages, lengths, k=2048, **options)


def in_engine(q: Any, pool: Any, pages: Any, lengths: Any, **options: Any) -> Any:
    """As the engine calls it: decode rows only."""
    table = PageTable(pages, lengths, lengths)
    return mla_attention(q, lengths, pool, table, **{"tile": 1, "shares": 1, "interleave": K} | options)


def in_engine_by_heads(q: Any, pool: Any, pages: Any, lengths: Any, w_uk: Any, w_uv: Any, **options: Any) -> Any:
    return in_engine(q, pool, pages, lengths, heads=HeadWeights(w_uk, w_uv), **options)


DECODE = TritonConfig(block_heads=16, block_tokens=64, warps=4, stages=2, workers=132)
TILES = TileConfig(block_lines=64, block_tokens=64, warps=4, stages=2, workers=132)
EXPANDED = ExpandedConfig(block_rows=64, block_tokens=64, warps=4, stages=2, chunk_tokens=2048)
INDEXER = IndexerConfig(
    logits=LogitsConfig(block_tokens=64, blocks=4, rows=1, warps=4, stages=2, fp8_products=True),
    select=SelectConfig(block=1024, chunk=16384, warps=8),
)
ATTENTION = {
    "mla_decode": attention(mla_decode, value_width=512, config=DECODE, chip="h200"),
    "mla_prefill": attention(mla_prefill, rows=1024, lengths=1024, tile=16, value_width=512, config=TILES, chip="h200"),
    "mla_prefill, expanded": attention(
        by_heads(mla_prefill), rows=4096, lengths=4096, tile=64, value_width=512, config=EXPANDED, chip="h200"
    ),
    "gqa_attention": attention(grouped, columns=128, config=TILES, chip="h200"),
    "sparse_mla": attention(selected, value_width=512, config=DECODE, chip="h200"),
    "indexer_topk": attention(indexed, columns=128, config=INDEXER, chip="h200"),
    "mla_attention": attention(in_engine, value_width=512, backend="xla"),
    "mla_attention, heads": attention(by_heads(in_engine_by_heads), value_width=512, backend="xla"),
}
NO_KEYS = r"there is nothing to attend to: a pool of {} pages of {} tokens, and a table \[64, {}\]"
OTHER_LENGTHS = r"lengths of 3 rows|and 3 counts of|lengths \(3,\)|but \[3\] positions|in shape \(3, 2048\)"
# What contradicts itself, for every op that has the argument: of which changes, in which words.
CONTRADICTIONS = {
    "no rows": ({"rows": 0, "sequences": 0, "lengths": 0}, "nothing to attend from: 0 query rows of 16 heads"),
    "no heads": ({"heads": 0}, r"nothing to attend from: \d+ query rows of 0 heads"),
    "no pages": ({"pages": 0}, NO_KEYS.format(0, 64, 8)),
    "pages of nothing": ({"page": 0}, NO_KEYS.format(100, 0, 8)),
    "a table of nothing": ({"table": 0}, NO_KEYS.format(100, 64, 0)),
    "tables of float32": ({"indices": jnp.float32}, r"are whole numbers, not float32: give int32"),
    "rows of int8": ({"dtype": jnp.int8}, r"floating numbers.* not int8"),
    "another width": (
        {"width": 96},
        r"(of (576|128) columns(?: need bfloat16 (rows|keys) of|, but keys bfloat16)|do not go with w_uk)",
    ),
    "lengths of others": ({"lengths": 3}, OTHER_LENGTHS),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
@pytest.mark.parametrize("op", ATTENTION)
def test_contradictions_are_refused_by_every_op_and_backend(op, case):
    changes, words = CONTRADICTIONS[case]
    ask = ATTENTION[op]
    ask()
    for backend in ({}, {"backend": "ref"}):
        with pytest.raises(ValueError, match=words):
            ask(**changes | backend)


@pytest.mark.parametrize("latent", [0, 576, -1])
@pytest.mark.parametrize("op", [op for op in ATTENTION if "mla" in op and "heads" not in op and "expanded" not in op])
def test_latents_that_are_not_inside_a_row_are_refused(op, latent):
    with pytest.raises(ValueError, match=f"the latent width {latent} is not inside the row of 576 columns"):
        ATTENTION[op](value_width=latent)


WIDE = "elements of float8_e4m3fn are beyond the 32-bit offsets that Pallas' Triton backend has up to 4 GiB"
FLOAT32 = "float32 {} do not fit in shared memory: give BF16"
FLOAT8 = "no kernel reads float8_e4m3fn {}: give BF16"
ROWS = {"mla_decode": "rows", "mla_prefill": "rows", "mla_prefill, expanded": "rows", "sparse_mla": "rows"}
KEYS = {"gqa_attention": "keys", "indexer_topk": "keys"}
ALIKE = "bfloat16 queries with {} keys: store both alike"
TAKEN = ""
# What kernels cannot take: the changes, and of every op that has such an argument the words, or that it takes it.
REFUSALS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "FP8 rows of 2 to 4 GiB": (
        {"dtype": FP8, "pages": 60_000}, dict.fromkeys(ROWS, WIDE) | {"mla_prefill, expanded": TAKEN},
    ),
    "FP8 rows of more": ({"dtype": FP8, "pages": 110_000}, dict.fromkeys(ROWS, TAKEN)),
    "FP8 keys of 2 to 4 GiB": ({"dtype": FP8, "pages": 300_000, "width": 132}, {"indexer_topk": WIDE}),
    "float32": (
        {"dtype": jnp.float32}, {op: FLOAT32.format(what) for op, what in ROWS.items()}
        | {"gqa_attention": FLOAT32.format("keys"), "indexer_topk": ALIKE.format("float32")},
    ),
    "float8 without scales": (
        {"dtype": jnp.float8_e4m3fn}, {op: FLOAT8.format(what) for op, what in ROWS.items()}
        | {"gqa_attention": FLOAT8.format("keys"), "indexer_topk": ALIKE.format("float8_e4m3fn")},
    ),
    "float16": (
        {"dtype": jnp.float16}, dict.fromkeys(ROWS | KEYS, TAKEN) | {"indexer_topk": ALIKE.format("float16")},
    ),
    "a latent width of 448": (
        {"value_width": 448, "columns": 512}, dict.fromkeys(ROWS, "the latent width is 448")
        | {"mla_prefill, expanded": TAKEN},
    ),
    "a rotary width of 48": ({"columns": 560}, dict.fromkeys(ROWS, "the rotary width is 48")),
    "heads of 96": (
        {"columns": 96}, {"gqa_attention": "the key width is 96", "indexer_topk": "the index heads' width is 96"},
    ),
    "pages of 3": ({"page": 3}, dict.fromkeys(ROWS | KEYS, TAKEN)),
    "18 heads": ({"heads": 18}, dict.fromkeys(ROWS | KEYS, TAKEN)),
    "a block of 48 tokens": (
        {"config": {"block_tokens": 48}}, dict.fromkeys(ROWS | KEYS, "the block of tokens is 48"),
    ),
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "mla_decode": DECODE, "mla_prefill": TILES, "mla_prefill, expanded": EXPANDED, "gqa_attention": TILES,
    "sparse_mla": DECODE,
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "case", "words"),
    [
        pytest.param(op, case, words, id=f"{op}, {case}")
        for case, (_, ops) in REFUSALS.items()
        for op, words in ops.items()
    ],
)
def test_what_a_kernel_cannot_take_goes_to_the_next_backend(op, case, words):
    """Named, the backend refuses; unnamed, the reference serves."""
    changes = dict(REFUSALS[case][0])
    if "config" in changes:
        own = changes["config"]
        indexer = replace(INDEXER, logits=replace(INDEXER.logits, **own))
        changes["config"] = indexer if op == "indexer_topk" else replace(CONFIGS[op], **own)
    ask = ATTENTION[op]
    served = jax.tree.map(lambda x: (x.shape, x.dtype), ask(**changes))
    if words == TAKEN:
        assert jax.tree.map(lambda x: (x.shape, x.dtype), ask(backend="triton", **changes)) == served
    else:
        with pytest.raises(NotImplementedError, match=words):
            ask(backend="triton", **changes)


def test_a_form_of_prefill_that_takes_what_the_other_refuses_serves_alone():
    """Whichever is cheaper needs both, and of FP8 rows of 2 to 4 GiB there is one only."""
    changes = {"rows": 4096, "lengths": 4096, "tile": 64, "value_width": 512, "chip": "h200", "backend": "triton"}
    ask = attention(by_heads(mla_prefill), **changes)
    out, _ = ask(dtype=FP8, pages=60_000)
    assert out.shape == (4096, H, 128)
    with pytest.raises(NotImplementedError, match="beyond the 32-bit offsets"):
        ask(dtype=FP8, pages=60_000, form="absorbed")


PAGES = struct((2**21, 1025), FP8)


@pytest.mark.parametrize(
    "call",
    [
        lambda backend: jax.eval_shape(partial(gather_pages, backend=backend), PAGES, struct((4,), jnp.int32)),
        lambda backend: jax.eval_shape(
            partial(gather_pages, backend=backend), struct((9, 1025), FP8), struct((2**21,), jnp.int32)
        ),
        lambda backend: jax.eval_shape(
            partial(scatter_pages, backend=backend), PAGES, struct((4,), jnp.int32), struct((4, 1025), FP8)
        ),
        lambda backend: jax.eval_shape(
            partial(scatter_pages, backend=backend), struct((9, 1025), FP8), struct((2**21,), jnp.int32), PAGES
        ),
        lambda backend: jax.eval_shape(PACKS[backend], (struct((2**17, 16, 1025), FP8),), struct((4,), jnp.int32)),
        lambda backend: jax.eval_shape(PACKS[backend], (struct((9, 16, 1025), FP8),), struct((2**17,), jnp.int32)),
    ],
    ids=["gather of many", "gather to many", "scatter to many", "scatter of many", "pack of many", "pack to many"],
)
def test_bytes_past_32_bits_are_refused_wherever_they_are(call):
    """Of what is read and of what is written: lines of an odd number of bytes are moved a byte at a time."""
    call("ref")
    with pytest.raises(NotImplementedError, match="elements of uint8 are beyond the 32-bit offsets"):
        call("triton")


def test_more_programs_than_a_launch_has_are_refused():
    few = struct((1,), jnp.float32)
    options: dict[str, Any] = {"out_shape": [few], "warps": 1, "stages": 1, "interpret": False, "name": "many"}
    with pytest.raises(NotImplementedError, match="2147483646 programs at most, not the 4294967296 of many"):
        triton_call(lambda *_: None, grid=(2**16, 2**16), **options)(jnp.zeros(1))
    (nothing,) = triton_call(lambda *_: None, grid=(2**16, 0), **options)(jnp.zeros(1))
    (given,) = triton_call(lambda *_: None, grid=(0,), aliases={0: 0}, **options)(jnp.ones(1))
    assert (nothing.item(), given.item()) == (0, 1) and MOST_PROGRAMS == 2**31 - 2


def test_rows_of_fp8_are_for_kernels():
    """XLA and the oracle of `mla_attention` read numbers; where there is no GPU, decode rows go to `mla_decode`'s."""
    ask = ATTENTION["mla_attention"]
    for backend in ("xla", "ref"):
        with pytest.raises(NotImplementedError, match=f"{backend} reads rows of numbers, not FP8 rows"):
            ask(dtype=FP8, backend=backend)
    out, _ = ask(dtype=FP8, backend="gpu")
    assert out.shape == (64, H, 512)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shares": 0}, "positions are dealt out over 0 shares in runs of 64: give both 1 or more"),
        ({"interleave": 0}, "positions are dealt out over 1 shares in runs of 0"),
    ],
)
def test_positions_that_cannot_be_dealt_out_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        ATTENTION["mla_attention"](**changes)


def test_work_for_other_rows_is_refused_by_every_op():
    for op in ("mla_decode", "sparse_mla"):
        work = DECODE.plan(jnp.zeros(3, jnp.int32))
        with pytest.raises(ValueError, match="work was cut for 3 rows, but there are 64 queries"):
            ATTENTION[op](work=work, backend="triton")
