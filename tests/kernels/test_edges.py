"""Every backend of every op on inputs at the edge: they agree with the oracle of the clean input that is meant."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dop_exchange import PACKS
from pallas_kernels.gqa_attention import TileConfig, gqa_attention
from pallas_kernels.indexer_topk import LogitsConfig, SelectConfig, indexer_topk, top_k
from pallas_kernels.indexer_topk import TritonConfig as IndexerConfig
from pallas_kernels.mla_attention import PageTable, mla_attention
from pallas_kernels.mla_decode import BlackwellConfig, HopperConfig, TritonConfig, mla_decode
from pallas_kernels.mla_prefill import ExpandedConfig, mla_prefill
from pallas_kernels.page_move import GATHERS, gather_pages, scatter_pages, send_pages
from pallas_kernels.sparse_mla import sparse_mla

MOST, LEAST = 2**31 - 1, -(2**31)
S, W, P = 4, 3, 8  # sequences, columns of their tables, pages
TILE = 2
DECODE = TritonConfig(block_heads=16, block_tokens=16, warps=4, stages=2, workers=2)
TILES = TileConfig(block_lines=16, block_tokens=16, warps=4, stages=2, workers=4)
EXPANDED = ExpandedConfig(block_rows=16, block_tokens=16, warps=4, stages=2, chunk_tokens=32)
INDEXER = IndexerConfig(
    logits=LogitsConfig(block_tokens=16, blocks=1, rows=2, warps=4, stages=2, fp8_products=False),
    select=SelectConfig(block=32, chunk=512, warps=4),
)
interpreted = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Mosaic GPU's interpret mode needs JAX 0.12")


@dataclass(frozen=True, kw_only=True)
class Op:
    """An op over a pool: `call(arrays, **options)`, where arrays has "pages" [S, W] and "lengths" [S]."""

    backends: Mapping[str, Mapping[str, Any]]
    make: Callable[[np.random.Generator], dict[str, Any]]
    call: Callable[..., Any]
    page: int = 4  # tokens
    seen: Callable[[np.ndarray], np.ndarray] = lambda lengths: lengths  # what rows see of them
    bf16: bool = False  # what is stored: float32 elsewhere


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16).astype(jnp.float32))


def latents(heads: int, columns: int, page: int, rows: int = S) -> Callable[[np.random.Generator], dict[str, Any]]:
    return lambda rng: {"q": normal(rng, rows, heads, columns) * 0.3, "pool": normal(rng, P, page, columns)}


def tiles_see(lengths: np.ndarray) -> np.ndarray:
    """Of TILE rows of every sequence the last sees all of it, the one before it one token fewer."""
    return np.stack([lengths.astype(np.int64) - 1, lengths], 1).clip(LEAST, MOST).astype(np.int32).reshape(-1)


def with_weights(rng: np.random.Generator) -> dict[str, Any]:
    """Tiles of 16 rows, which the expanded form takes."""
    made = {"q": normal(rng, 16 * S, 2, 32) * 0.3, "pool": normal(rng, P, 4, 48)}
    return made | {"w_uk": normal(rng, 2, 32, 16), "w_uv": normal(rng, 2, 16, 32)}


def attended(x: dict[str, Any], **options: Any) -> Any:
    """Decode rows at the ends of their histories; a row's position is no reason to see less than is held."""
    positions = jnp.where(x["lengths"] > 0, jnp.minimum(x["lengths"], 10**6) - 1, -1)
    table = PageTable(x["pages"], x["lengths"], jnp.zeros_like(x["lengths"]))
    return mla_attention(x["q"], positions, x["pool"], table, value_width=7, tile=1, shares=1, interleave=4, **options)


def selected(x: dict[str, Any], **options: Any) -> Any:
    """All tokens of every row, in places that hold nothing else."""
    token = jnp.arange(2 * W * 4, dtype=jnp.int32)[None]
    lists = jnp.where(token < x["lengths"][:, None], token, -1)
    return sparse_mla(x["q"], x["pool"], lists, x["pages"], value_width=32, **options)


TRITON = {"backend": "triton", "interpret": True}
OPS = {
    "mla_decode": Op(
        backends={"ref": {"backend": "ref"}, "triton": TRITON | {"config": DECODE}}, make=latents(3, 48, 4),
        call=lambda x, **how: mla_decode(x["q"], x["pool"], x["pages"], x["lengths"], value_width=32, **how),
    ),
    "mla_decode by Mosaic": Op(
        backends={
            "ref": {"backend": "ref"},
            "hopper": {"backend": "hopper", "interpret": True, "config": HopperConfig(stages=2, workers=2)},
            "blackwell": {
                "backend": "blackwell", "interpret": True, "config": BlackwellConfig(stages=2, tiles=3, workers=2),
            },
        }, make=latents(3, 192, 64), page=64, bf16=True,
        call=lambda x, **how: mla_decode(x["q"], x["pool"], x["pages"], x["lengths"], value_width=128, **how),
    ),
    "mla_prefill": Op(
        backends={"ref": {"backend": "ref"}, "triton": TRITON | {"config": TILES}},
        make=latents(3, 48, 4, TILE * S), seen=tiles_see,
        call=lambda x, **how: mla_prefill(
            x["q"], x["pool"], x["pages"], x["lengths"], tile=TILE, value_width=32, **how
        ),
    ),
    "mla_prefill, expanded": Op(
        backends={"ref": {"backend": "ref"}, "triton": TRITON | {"config": EXPANDED}}, make=with_weights,
        seen=lambda lengths: np.repeat(lengths, 16),
        call=lambda x, **how: mla_prefill(
            x["q"], x["pool"], x["pages"], x["lengths"], tile=16, value_width=32, w_uk=x["w_uk"], w_uv=x["w_uv"], **how
        ),
    ),
    "gqa_attention": Op(
        backends={"ref": {"backend": "ref"}, "triton": TRITON | {"config": TILES}},
        make=lambda rng: {
            "q": normal(rng, TILE * S, 6, 16) * 0.3, "pool": normal(rng, P, 4, 2, 16),
            "values": normal(rng, P, 4, 2, 32),
        }, seen=tiles_see,
        call=lambda x, **how: gqa_attention(
            x["q"], x["pool"], x["values"], x["pages"], x["lengths"], tile=TILE, **how
        ),
    ),
    "sparse_mla": Op(
        backends={"ref": {"backend": "ref"}, "triton": TRITON | {"config": DECODE}}, make=latents(3, 48, 4),
        call=selected,
    ),
    "indexer_topk": Op(
        backends={"ref": {"backend": "ref"}, "triton": TRITON | {"config": INDEXER}},
        make=lambda rng: {
            "q": normal(rng, TILE * S, 3, 16), "weights": normal(rng, TILE * S, 3), "pool": normal(rng, P, 4, 16),
        }, seen=tiles_see,
        call=lambda x, **how: indexer_topk(x["q"], x["weights"], x["pool"], x["pages"], x["lengths"], k=5, **how),
    ),
    "mla_attention": Op(
        backends={name: {"backend": name} for name in ("ref", "xla", "gpu")}, make=latents(3, 10, 4), call=attended,
    ),
}  # fmt: skip

# What stands in the table behind the pages that a row sees; and lengths where tables have room for 12 tokens, of longer
# pages as many pages.
BEHIND = {"the end's": P, "any": 2**30, "-1": -1, "the least": LEAST, "the last page": P - 1}
LENGTHS = {
    "ragged": [5, 12, 0, 1],
    "all empty": [0, 0, 0, 0],
    "below 0": [-1, LEAST, 3, -5],
    "beyond the table": [13, MOST, 12, 99],
}
EDGES = [("ragged", name) for name in BEHIND] + [(name, "any") for name in LENGTHS if name != "ragged"]


@cache
def program(op: str, backend: str) -> Any:
    return jax.jit(partial(OPS[op].call, **OPS[op].backends[backend]))


@cache
def given(op: str) -> dict[str, Any]:
    made = OPS[op].make(np.random.default_rng(sorted(OPS).index(op)))
    return {k: jnp.asarray(v, jnp.bfloat16) if OPS[op].bf16 else jnp.asarray(v) for k, v in made.items()}


def lengths_of(op: Op, tokens: list[int]) -> np.ndarray:
    wanted = np.array(tokens, np.int64) * (op.page // 4)
    return wanted.clip(LEAST, MOST).astype(np.int32)


def tables(op: Op, meant: np.ndarray, behind: int, same: bool = False) -> np.ndarray:
    """Pages of their own for what is meant, as far as there are any; with `same` the first two rows share theirs."""
    pages = np.full((S, W), behind, np.int32)
    free = np.random.default_rng(1).permutation(P)
    taken = 0
    for row, tokens in enumerate(meant):
        count = -(-int(tokens) // op.page)
        pages[row, :count] = free[(taken + np.arange(count)) % P]
        taken += 0 if same else count
    return pages


def poisoned(pool: Any, op: Op, pages: np.ndarray, meant: np.ndarray) -> Any:
    """NaN wherever no row sees anything."""
    there = np.zeros((P, op.page), bool)
    for row, tokens in enumerate(meant):
        token = np.arange(tokens)
        there[pages[row, token // op.page], token % op.page] = True
    return jnp.where(jnp.asarray(there).reshape(P, op.page, *[1] * (pool.ndim - 2)), pool, jnp.nan)


def agrees(op: str, backend: str, tokens: list[int], behind: int, same: bool = False) -> None:
    case, x = OPS[op], given(op)
    lengths, room = lengths_of(case, tokens), W * case.page
    clean, sees = lengths.clip(0, room), case.seen(lengths).clip(0, room)
    pages = tables(case, clean, behind, same)
    inside = np.where((pages >= 0) & (pages < P), pages, 0)
    want = program(op, "ref")(x | {"pages": inside, "lengths": sees})
    pools = {name: poisoned(x[name], case, pages, clean) for name in ("pool", "values") if name in x}
    got = program(op, backend)(x | pools | {"pages": pages, "lengths": case.seen(lengths)})
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        close = 2e-2 if case.bf16 else 2e-5
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=close, atol=close)
    if op != "indexer_topk":
        assert (np.asarray(want[1])[sees == 0] == -np.inf).all()


EVERY = [
    pytest.param(op, backend, id=f"{op}: {backend}", marks=[interpreted] if backend in ("hopper", "blackwell") else [])
    for op, case in OPS.items()
    for backend in case.backends
]


@pytest.mark.parametrize(("op", "backend"), EVERY)
def test_tables_and_lengths_mean_the_same_to_all(op, backend):
    """Numbers behind what is seen, lengths out of range, empty rows: one program for all of them."""
    for name, behind in EDGES:
        agrees(op, backend, LENGTHS[name], BEHIND[behind])


@pytest.mark.parametrize(("op", "backend"), EVERY)
def test_pages_may_be_shared(op, backend):
    """By rows, and by a row with itself: a page twice is read twice."""
    agrees(op, backend, LENGTHS["ragged"], -1, same=True)
    case, x = OPS[op], given(op)
    twice = np.tile(np.array([[3, 3, 5]], np.int32), (S, 1))
    lengths = case.seen(lengths_of(case, [12, 8, 5, 1]))
    both = [program(op, name)(x | {"pages": twice, "lengths": lengths}) for name in ("ref", backend)]
    for g, w in zip(*(jax.tree.leaves(each) for each in both), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-2 if case.bf16 else 2e-5, atol=2e-2 if case.bf16 else 2e-5)


@pytest.mark.parametrize("how", OPS["sparse_mla"].backends.values(), ids=str)
def test_a_selected_number_that_is_no_token_selects_nothing(how):
    """A token twice counts twice, in every backend; -1, the table's end and any other number never."""
    x = given("sparse_mla")
    pages = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3]], np.int32)
    lists = np.full((S, 24), -1, np.int32)
    lists[0, :8] = [3, LEAST, 12, MOST, -1, 0, 2**30, 11]
    lists[1, :4] = [5, 5, 12, 7]
    lists[2, -1] = 9
    attend = jax.jit(partial(sparse_mla, value_width=32, **how))
    out, lse = (np.asarray(y) for y in attend(x["q"], x["pool"], lists, pages))
    rows = np.asarray(x["pool"], np.float64).reshape(-1, 48)
    for r, tokens in enumerate(([3, 0, 11], [5, 5, 7], [9], [])):
        keys = rows[[pages[r, t // 4] * 4 + t % 4 for t in tokens]]
        scores = np.asarray(x["q"], np.float64)[r] @ keys.T
        weights = np.exp(scores)
        want = np.log(weights.sum(-1)) if tokens else np.full(3, -np.inf)
        np.testing.assert_allclose(lse[r], want, rtol=1e-5, atol=1e-5)
        mean = weights @ keys[:, :32] / weights.sum(-1, keepdims=True) if tokens else np.zeros((3, 32))
        np.testing.assert_allclose(out[r], mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", OPS["mla_prefill, expanded"].backends.values(), ids=str)
def test_tiles_of_padding_may_name_any_sequence(how):
    x = given("mla_prefill, expanded")
    seen = np.zeros(16 * S, np.int32)
    seen[:16], seen[32:48] = 5, 9
    pages = np.array([[0, 1, 2], [3, 4, 5]], np.int32)
    weights = {name: x[name] for name in ("w_uk", "w_uv")}
    prefill = jax.jit(partial(mla_prefill, tile=16, value_width=32, **how))
    each = [
        prefill(x["q"], x["pool"], pages, seen, sequence=np.array(sequence, np.int32), **weights)
        for sequence in ((1, 0, 0, 1), (1, -1, 0, MOST))
    ]
    for a, b in zip(*each, strict=True):
        np.testing.assert_array_equal(a, b)


MOVES = pytest.mark.parametrize("how", [{"backend": name, "interpret": name != "ref"} for name in GATHERS], ids=str)


@MOVES
@pytest.mark.parametrize(
    ("pages", "page", "slots"),
    [
        (5, (3,), [4, -1, 5, MOST, LEAST, -5, 0]),
        (5, (3,), []),
        (0, (3,), [0, -1, 1]),
        (0, (3,), []),
        (3, (0,), [2, 7]),
        (1, (2, 1), [0]),
    ],
    ids=str,
)
def test_slots_outside_a_pool_are_no_pages(pages, page, slots, how):
    """And pools, pages and lists of nothing are moved as such."""
    rng = np.random.default_rng(0)
    pool = jnp.asarray(rng.integers(0, 2**16, (pages, *page)), jnp.uint16)
    source = jnp.asarray(rng.integers(0, 2**16, (len(slots), *page)), jnp.uint16)
    at = np.array(slots, np.int32)
    want, written = np.zeros_like(source), np.array(pool)
    for i, slot in enumerate(slots):
        if 0 <= slot < pages:
            want[i], written[slot] = pool[slot], source[i]
    np.testing.assert_array_equal(gather_pages(pool, at, **how), want)
    np.testing.assert_array_equal(scatter_pages(pool, at, source, **how), written)


@MOVES
def test_an_exchange_of_nothing_leaves_the_pool(how):
    pool, none = jnp.ones((3, 4), jnp.uint16), jnp.zeros((2, 0), jnp.int32)
    np.testing.assert_array_equal(send_pages(pool, 2 * pool, none, none, axis="rank", chunks=3, **how), 2 * pool)


@pytest.mark.parametrize("how", PACKS)
@pytest.mark.parametrize("rows", [[3, -1, 4, MOST, LEAST, 0, 0], []], ids=str)
def test_rows_outside_a_step_pack_as_zeros(how, rows):
    rng = np.random.default_rng(0)
    parts = tuple(jnp.asarray(rng.integers(1, 2**16, (4, 3, width)), jnp.uint16) for width in (5, 2))
    pack = PACKS[how] if how == "ref" else partial(PACKS[how], interpret=True)
    want = np.zeros((len(rows), 3, 7), np.uint16)
    for i, row in enumerate(rows):
        if 0 <= row < 4:
            want[i] = np.concatenate([part[row] for part in parts], -1)
    np.testing.assert_array_equal(pack(parts, jnp.asarray(rows, jnp.int32)), want)


@pytest.mark.parametrize("config", [None, SelectConfig(block=32, chunk=8, warps=4)], ids=["ref", "triton"])
@pytest.mark.parametrize("columns", [0, 9, 40])
def test_selections_agree_on_nan_infinities_and_lengths_that_cannot_be(columns, config):
    """NaN is never taken, -inf is where enough else lacks; lengths are cut to 0 and to the columns."""
    rng, k = np.random.default_rng(0), 4
    x = rng.choice(np.array([np.nan, -np.inf, np.inf, -0.0, 0.0, 1.0, -3e38], np.float32), (8, columns))
    if columns:
        x[0], x[1] = np.nan, -np.inf
    lengths = np.array([columns, columns, MOST, LEAST, -1, 3, 0, columns + 1], np.int32)
    how = {"backend": "ref"} if config is None else {"backend": "triton", "config": config, "interpret": True}
    got = np.asarray(top_k(jnp.asarray(x), jnp.asarray(lengths), k=k, **how))
    for row, length, found in zip(x, lengths.clip(0, columns), got, strict=True):
        there = np.flatnonzero(~np.isnan(row[:length]))
        best = sorted(there[np.lexsort((there, -row[there].astype(np.float64)))[:k]].tolist())
        assert found.tolist() == best + [-1] * (k - len(best))
