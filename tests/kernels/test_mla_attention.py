"""Both backends against numpy float64, with a tolerance that rejects the bugs such a kernel can have."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_attention import IMPLEMENTATIONS, HeadWeights, PageTable, gpu, mla_attention, xla
from pallas_kernels.mla_prefill import mla_prefill
from splash_jax.layouts import make_layout
from splash_jax.layouts.merge import merge_parts
from splash_jax.ownership import KVShape

H, D, V, PAGE, PAGES, WIDTH = 3, 10, 7, 4, 48, 6  # width: pages per sequence in the table


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences of (length, rows, lag): `rows` query rows that end at position length - 1."""

    decode: tuple[tuple[int, int, int], ...] = ()
    tiles: tuple[tuple[int, int, int], ...] = ()
    tile: int = 4
    shares: int = 1
    interleave: int = PAGE

    @property
    def rows(self) -> int:
        return len(self.decode) + self.tile * len(self.tiles)


CASES = {
    "decode rows": Case(decode=((1, 1, 0), (3, 1, 0), (4, 1, 0), (17, 1, 0), (24, 1, 0))),
    "one sequence": Case(decode=((13, 1, 0),)),
    "one tile": Case(tiles=((7, 4, 0),)),
    "tiles and decode rows": Case(decode=((5, 1, 0), (0, 0, 0), (23, 1, 0)), tiles=((4, 4, 0), (22, 3, 0), (0, 0, 0))),
    "shares": Case(decode=tuple((33, 1, lag) for lag in range(4)), tiles=((30, 4, 2), (6, 4, 1)), shares=4),
    "interleave 2": Case(decode=tuple((33, 1, lag) for lag in range(4)), tiles=((30, 4, 3),), shares=4, interleave=2),
    "interleave 1": Case(decode=((9, 1, 0), (9, 1, 1), (1, 1, 2)), tiles=((17, 4, 2),), shares=3, interleave=1),
    "only padding": Case(decode=((0, 0, 0),) * 2, tiles=((0, 0, 0),)),
    "tiles of one row": Case(decode=((6, 1, 0),), tiles=((11, 1, 0), (2, 1, 0)), tile=1),
}


def kv_of(case: Case) -> tuple[KVShape, Any]:
    layout = make_layout("cp", {"rank": case.shares})
    return KVShape(page_size=PAGE, interleave=case.interleave, bytes_per_token=1), layout


@cache
def inputs(name: str) -> dict[str, np.ndarray]:
    """Queries and keys with spread, positions, and a pool that is NaN wherever no key lies."""
    case, rng = CASES[name], np.random.default_rng(sorted(CASES).index(name))
    kv, layout = kv_of(case)
    sequences = [*case.decode, *case.tiles]
    free = rng.permutation(PAGES).tolist()
    pool = np.full((PAGES, PAGE, D), np.nan, np.float32)
    pages = np.full((len(sequences), WIDTH), free.pop(), np.int32)  # padding entries point at a page of NaN
    held, lag = np.zeros(len(sequences), np.int32), np.zeros(len(sequences), np.int32)
    positions = np.full(case.rows, -1, np.int32)
    for s, (length, rows, at) in enumerate(sequences):
        lag[s], held[s] = at, kv.tokens_held(layout, at, length)
        mine = [free.pop() for _ in range(-(-int(held[s]) // PAGE))]
        pages[s, : len(mine)] = mine
        flat = pool[mine].reshape(-1, D)
        flat[: held[s]] = rng.normal(size=(held[s], D)) * np.exp(rng.normal(0, 0.5, (held[s], 1)))
        pool[mine] = flat.reshape(-1, PAGE, D)
        first = s if s < len(case.decode) else len(case.decode) + (s - len(case.decode)) * case.tile
        positions[first : first + rows] = np.arange(length - rows, length)
    q = rng.normal(0, 0.6, (case.rows, H, D)).astype(np.float32)
    return {"q": q, "positions": positions, "pool": pool, "pages": pages, "held": held, "lag": lag}


def reference(case: Case, given: dict[str, np.ndarray], mask: Any = np.less_equal) -> tuple[np.ndarray, np.ndarray]:
    """Row by row in float64; `mask(key position, row position)` says what a row sees."""
    kv, layout = kv_of(case)
    out, lse = np.zeros((case.rows, H, V)), np.full((case.rows, H), -np.inf)
    for row in range(case.rows):
        s = row if row < len(case.decode) else len(case.decode) + (row - len(case.decode)) // case.tile
        local = np.arange(given["held"][s])
        seen = mask(kv.positions(layout, int(given["lag"][s]), local), given["positions"][row])
        if given["positions"][row] < 0 or not seen.any():
            continue
        keys = given["pool"][given["pages"][s]].reshape(-1, D)[local][seen].astype(np.float64)
        scores = given["q"][row].astype(np.float64) @ keys.T
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        out[row] = weights @ keys[:, :V] / weights.sum(-1, keepdims=True)
        lse[row] = np.log(weights.sum(-1)) + top[:, 0]
    return out, lse


def run(
    name: str, backend: str, given: dict[str, np.ndarray], dtype: Any = np.float32
) -> tuple[np.ndarray, np.ndarray]:
    case = CASES[name]
    static = {"value_width": V, "tile": case.tile, "shares": case.shares, "interleave": case.interleave}
    table = PageTable(*(jnp.asarray(given[k]) for k in PageTable._fields))
    attend = jax.jit(partial(mla_attention, **static, backend=backend))
    out, lse = attend(
        jnp.asarray(given["q"]).astype(dtype), given["positions"], jnp.asarray(given["pool"]).astype(dtype), table
    )
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    return np.asarray(out), np.asarray(lse)


# Largest error at the 50%, 99% and 100% quantile of all outputs, relative to 1 + |value|.
TOLERANCE = {"float32": (2e-7, 2e-6, 4e-6), "bfloat16": (3e-3, 2e-2, 4e-2)}


def within(got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray], dtype: str = "float32") -> bool:
    """Infinities must lie alike; then all finite errors must pass each quantile."""
    errors = []
    for g, w in zip(got, want, strict=True):
        if not np.array_equal(np.isfinite(g), np.isfinite(w)) or np.isnan(g).any():
            return False
        some = np.isfinite(w)
        errors.append((np.abs(g[some] - w[some]) / (1 + np.abs(w[some]))).ravel())
    flat = np.concatenate(errors)
    return all(np.quantile(flat, q) <= t for q, t in zip((0.5, 0.99, 1.0), TOLERANCE[dtype], strict=True))


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_softmax_attention(name, backend):
    given = inputs(name)
    out, lse = run(name, backend, given)
    assert within((out, lse), reference(CASES[name], given))
    padding = given["positions"] < 0
    assert (out[padding] == 0).all() and (lse[padding] == -np.inf).all()


@pytest.mark.parametrize("name", ["tiles and decode rows", "interleave 2"])
def test_several_blocks_are_one_softmax(name, monkeypatch):
    """Histories longer than the loop's block, cut in the middle of a request."""
    monkeypatch.setattr(xla, "BLOCK_TOKENS", 2 * PAGE)
    given = inputs(name)
    assert within(run(name, "xla", given), reference(CASES[name], given))


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
def test_bfloat16(backend):
    name = "tiles and decode rows"
    rounded = {
        k: np.array(jnp.asarray(v).astype(jnp.bfloat16).astype(jnp.float32))
        for k, v in inputs(name).items()
        if k in ("q", "pool")
    }
    given = inputs(name) | rounded
    assert within(run(name, backend, given, jnp.bfloat16), reference(CASES[name], given), "bfloat16")


def test_the_shares_of_a_request_merge_to_the_whole():
    """Rows 0 to 3 of "shares" are one request's last token against each of its four shares."""
    name = "shares"
    given = dict(inputs(name))
    given["q"] = np.concatenate([np.repeat(given["q"][:1], 4, 0), given["q"][4:]])
    out, lse = run(name, "xla", given)
    kv, layout = kv_of(CASES[name])
    keys = np.zeros((33, D))
    for s in range(4):
        local = np.arange(given["held"][s])
        keys[kv.positions(layout, s, local)] = given["pool"][given["pages"][s]].reshape(-1, D)[local]
    scores = given["q"][0].astype(np.float64) @ keys.T
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    merged, _ = jax.jit(merge_parts)(out[:4], lse[:4])
    np.testing.assert_allclose(merged, weights @ keys[:, :V] / weights.sum(-1, keepdims=True), atol=2e-6)


def lose_a_page(case: Case, given: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    pages = given["pages"].copy()
    pages[:, 0] = pages[:, 1]  # every request's first page answers with its second
    filled = np.nan_to_num(given["pool"])
    return reference(case, given | {"pages": pages, "pool": filled})


# Bugs a kernel could have. The tolerance is fit for use only while it rejects them all.
MUTANTS = {
    "off by one, itself unseen": lambda case, x: reference(case, x, np.less),
    "off by one, sees the next": lambda case, x: reference(case, x, lambda key, row: key <= row + 1),
    "no mask": lambda case, x: reference(case, x, lambda key, row: key >= 0),
    "one page lost": lose_a_page,
    "wrong lag": lambda case, x: reference(case, x | {"lag": (x["lag"] + 1) % case.shares}),
    "wrong interleave": lambda case, x: reference(replace(case, interleave=PAGE), x),
    "scale wrong": lambda case, x: reference(case, x | {"q": x["q"] * np.float32(1.01)}),
    "one key fewer": lambda case, x: reference(case, x | {"held": np.maximum(x["held"] - 1, 0)}),
    "values shifted": lambda case, x: tuple(np.roll(part, 1, -1) for part in reference(case, x)),
}
SHOWN_BY = {"wrong lag": "interleave 2", "wrong interleave": "interleave 2"}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_tolerance_rejects(mutant, dtype):
    name = SHOWN_BY.get(mutant, "tiles and decode rows")
    given = inputs(name)
    want = reference(CASES[name], given)
    assert within(want, want, dtype)
    if (mutant, dtype) == ("scale wrong", "bfloat16"):
        given = given | {"q": given["q"] * np.float32(1.1)}  # a bfloat16 step is 0.8%: only more than that can show
    assert not within(MUTANTS[mutant](CASES[name], given), want, dtype)


def test_what_a_decode_row_sees_is_counted():
    """Of every history, seen from every position, not only its last; and nothing at position -1."""
    for shares, interleave in ((1, 1), (1, 4), (3, 1), (4, 2), (2, 4)):
        kv, layout = kv_of(Case(shares=shares, interleave=interleave))
        lag, held, at = (x.ravel() for x in np.meshgrid(range(shares), range(13), range(-1, 40), indexing="ij"))
        table = PageTable(jnp.zeros((len(lag), 1), jnp.int32), *(jnp.asarray(x, jnp.int32) for x in (held, lag)))
        got = gpu.visible_tokens(jnp.asarray(at, jnp.int32), table, shares, interleave)
        want = [int((kv.positions(layout, g, np.arange(n)) <= p).sum()) for g, n, p in zip(lag, held, at, strict=True)]
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "name", ["shares", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tiles and decode rows", "interleave 2"))]
)
def test_tiles_reach_prefill_with_what_their_rows_see(name, monkeypatch):
    """On a GPU: the oracle stands in for the kernel, which has tests of its own."""
    case, given, called = CASES[name], inputs(name), []

    def oracle(*args: Any, **options: Any) -> Any:
        called.append(options)
        return mla_prefill(*args, **options | {"backend": "ref"})

    monkeypatch.setattr(gpu.prefill, "mla_prefill", oracle)
    table = PageTable(*(jnp.asarray(given[k]) for k in PageTable._fields))
    got = mla_attention(
        jnp.asarray(given["q"]), given["positions"], jnp.asarray(given["pool"]), table, value_width=V, tile=case.tile,
        shares=case.shares, interleave=case.interleave, backend="gpu", chip="h200",
    )  # fmt: skip
    assert within(tuple(np.asarray(x) for x in got), reference(case, given))
    assert called == [{"tile": case.tile, "value_width": V, "sequence": None, "backend": "triton", "chip": "h200"}]


@pytest.mark.parametrize(("backend", "chip"), [*((name, None) for name in IMPLEMENTATIONS), ("gpu", "h200")])
def test_with_their_weights_heads_keep_their_own_widths(backend, chip, monkeypatch):
    """Queries of 2 + 3 columns to values of 4: the projections of float64 around its attention over latents."""
    name, rng, called = "tiles and decode rows", np.random.default_rng(5), []
    case, given = CASES[name], inputs(name)
    w_uk, w_uv = (rng.normal(0, 0.4, shape).astype(np.float32) for shape in ((H, V, 2), (H, 4, V)))
    q = rng.normal(0, 0.6, (case.rows, H, 2 + D - V)).astype(np.float32)
    latent = np.einsum("rhn,hcn->rhc", q[..., :2], w_uk)
    out, lse = reference(case, given | {"q": np.concatenate([latent, q[..., 2:]], -1)})
    want = np.einsum("rhc,hvc->rhv", out, w_uv), lse

    def oracle(*args: Any, **options: Any) -> Any:
        called.append(options)
        return mla_prefill(*args, **options | {"backend": "ref"})

    monkeypatch.setattr(gpu.prefill, "mla_prefill", oracle)
    prompts = jnp.asarray([0, 1, 2], jnp.int32)
    got = mla_attention(
        jnp.asarray(q), given["positions"], jnp.asarray(given["pool"]),
        PageTable(*(jnp.asarray(given[k]) for k in PageTable._fields)), value_width=V, tile=case.tile,
        shares=case.shares, interleave=case.interleave, heads=HeadWeights(jnp.asarray(w_uk), jnp.asarray(w_uv)),
        prompts=prompts, backend=backend, chip=chip,
    )  # fmt: skip
    assert within(tuple(np.asarray(x) for x in got), want)
    if chip:
        (options,) = called
        assert options["sequence"] is prompts and options["w_uk"].shape == (H, V, 2)


def test_backends_and_weights_that_are_not_there_are_refused():
    given = inputs("one tile")
    table = PageTable(given["pages"], given["held"], given["lag"])
    attend = partial(
        mla_attention, given["q"], given["positions"], given["pool"], table, value_width=V, tile=4, shares=1,
        interleave=PAGE,
    )  # fmt: skip
    with pytest.raises(ValueError, match="mla_attention has no backend 'triton'; it has: gpu, xla, ref"):
        attend(backend="triton")
    with pytest.raises(ValueError, match=r"queries \[4, 3, 10\] over 7 latent and 3 rotary columns do not go"):
        attend(heads=HeadWeights(jnp.zeros((H, V, 2)), jnp.zeros((H, 4, V))))


def test_shapes_that_do_not_split_are_refused():
    given = inputs("tiles and decode rows")
    table = PageTable(given["pages"], given["held"], given["lag"])
    with pytest.raises(ValueError, match="15 rows and 6 sequences do not split into tiles of 5 rows"):
        mla_attention(
            given["q"], given["positions"], given["pool"], table, value_width=V, tile=5, shares=1, interleave=PAGE
        )
