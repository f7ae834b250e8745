"""Both forms against numpy float64 in interpret mode, with tolerances that reject the bugs such kernels can have."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given as draw
from hypothesis import settings
from hypothesis import strategies as st

from pallas_kernels.mla_prefill import ExpandedConfig, TileConfig, api, mla_prefill
from tests.kernels.mla_cases import TOLERANCE, Case, Given, reference, within
from tests.kernels.tile_cases import Prompts, Tiles, make_tiles

RAGGED = ((40, 24), (5, 5), (0, 0), (130, 3), (33, 17))
PROBLEMS = {
    "ragged": (Case(lengths=(), heads=4), Prompts(sequences=RAGGED)),
    "a page is longer than a block": (Case(lengths=(), heads=2, page_size=64), Prompts(sequences=((70, 9), (64, 16)))),
    "lines that fill no block": (Case(lengths=(), heads=3, page_size=8), Prompts(sequences=((20, 20), (41, 1)))),
    "one row a tile": (Case(lengths=(), heads=20), Prompts(sequences=((37, 2), (0, 0), (1, 1)), tile=1)),
    "fp8": (
        Case(lengths=(), heads=4, latent=256, page_size=16, fp8=True),
        Prompts(sequences=((60, 20), (0, 0), (9, 9))),
    ),
}
# Items of a tile split among many workers and merged; and tiles taken whole.
SPLIT = TileConfig(block_lines=32, block_tokens=16, warps=4, stages=2, workers=24)
WHOLE = TileConfig(block_lines=32, block_tokens=16, warps=4, stages=2, workers=1)
EXPANDED = ExpandedConfig(block_rows=16, block_tokens=16, warps=4, stages=2, chunk_tokens=64)
NOPE, VALUE = 16, 32


@cache
def problem(name: str) -> tuple[Given, Tiles, tuple[np.ndarray, np.ndarray]]:
    case, prompts = PROBLEMS[name]
    given, tiles = make_tiles(case, prompts)
    return given, tiles, reference(case, given)


def run(name: str, dtype: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    case, prompts = PROBLEMS[name]
    given, tiles, _ = problem(name)
    pool = jnp.asarray(given.pool) if case.fp8 else jnp.asarray(given.pool).astype(dtype)
    prefill = jax.jit(partial(mla_prefill, tile=prompts.tile, value_width=case.latent, **options))
    q = jnp.asarray(given.q).astype(dtype)
    out, lse = prefill(q, pool, tiles.pages, tiles.seen, sequence=tiles.sequence)
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    return np.asarray(out), np.asarray(lse)


FAST = ("ragged", "fp8")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, SPLIT) for name in FAST),
        *(pytest.param(name, SPLIT, marks=pytest.mark.slow) for name in PROBLEMS if name not in FAST),
        *(pytest.param(name, WHOLE, marks=pytest.mark.slow) for name in PROBLEMS),
    ],
)
def test_the_absorbed_form_is_softmax_attention(name, config):
    dtype = jnp.float32 if name == "ragged" else jnp.bfloat16
    got = run(name, dtype, backend="triton", config=config, interpret=True)
    assert within(got, problem(name)[2], "fp8, unscaled" if PROBLEMS[name][0].fp8 else jnp.dtype(dtype).name)
    padding = problem(name)[1].seen == 0
    assert padding.any() and (got[0][padding] == 0).all() and (got[1][padding] == -np.inf).all()


@pytest.mark.parametrize("name", ["ragged", "fp8"])
def test_ref_is_softmax_attention(name):
    """With the float32 tolerance in both formats: it rounds nothing. Without a GPU it is what the op chooses."""
    assert within(run(name, jnp.float32), problem(name)[2], "float32")


def weights(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Exact in bfloat16, sized so that a head's keys have about the latents' spread."""
    rng = np.random.default_rng(7)
    w_uk = rng.normal(0, case.latent**-0.5, (case.heads, case.latent, NOPE))
    w_uv = rng.normal(0, case.latent**-0.5, (case.heads, VALUE, case.latent))
    return tuple(np.array(jnp.asarray(w, jnp.bfloat16).astype(jnp.float32)) for w in (w_uk, w_uv))


def expanded_reference(case: Case, given: Given, w_uk: np.ndarray, w_uv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The absorbed attention of float64 between float64 projections."""
    q = given.q.astype(np.float64)
    latent = np.einsum("rhn,hcn->rhc", q[..., :NOPE], w_uk.astype(np.float64))
    out, lse = reference(case, given._replace(q=np.concatenate([latent, q[..., NOPE:]], -1)))
    return np.einsum("rhc,hvc->rhv", out, w_uv.astype(np.float64)), lse


def run_with_weights(name: str, dtype: Any, jitted: bool = True, **options: Any) -> tuple[Any, Any]:
    """What came out, and what should have."""
    case, prompts = PROBLEMS[name]
    given, tiles, _ = problem(name)
    w_uk, w_uv = weights(case)
    given = given._replace(q=given.q[..., : NOPE + case.rotary])
    pool = jnp.asarray(given.pool) if case.fp8 else jnp.asarray(given.pool).astype(dtype)
    prefill = partial(mla_prefill, tile=prompts.tile, value_width=case.latent, **options)
    prefill = jax.jit(prefill) if jitted else prefill
    q, uk, uv = (jnp.asarray(x).astype(dtype) for x in (given.q, w_uk, w_uv))
    pages, seen, sequence = (jnp.asarray(x) for x in (tiles.pages, tiles.seen, tiles.sequence))
    got = prefill(q, pool, pages, seen, sequence=sequence, w_uk=uk, w_uv=uv)
    return got, expanded_reference(case, given, w_uk, w_uv)


@pytest.mark.parametrize(
    "name", ["ragged", *(pytest.param(n, marks=pytest.mark.slow) for n in ("a page is longer than a block", "fp8"))]
)
def test_the_expanded_form_is_softmax_attention(name):
    """Over several chunks, which begin and end inside sequences. BF16 rounds the keys once more than the absorbed."""
    dtype = jnp.float32 if name == "ragged" else jnp.bfloat16
    got, want = run_with_weights(name, dtype, form="expanded", backend="triton", config=EXPANDED, interpret=True)
    assert within(got, want, "float32" if dtype == jnp.float32 else "fp8")
    assert (np.asarray(got[0])[problem(name)[1].seen == 0] == 0).all()


@pytest.mark.parametrize("pays", [True, False])
def test_the_program_itself_takes_the_cheaper_form(pays, monkeypatch):
    """Asked with what the rows really see: every sequence's blocks once, however many tiles it has, in whole chunks."""
    asked, ran, attend = [], [], api.expanded.attend
    small = {"absorbed": WHOLE, "expanded": EXPANDED}

    def rule(call: Any, chip: str, pairs: Any, tokens: Any) -> Any:
        asked.append((call, chip, float(pairs), float(tokens)))
        return jnp.asarray(pays)

    def marked(*args: Any, **options: Any) -> Any:
        jax.debug.callback(lambda: ran.append("expanded"))
        return attend(*args, **options)

    monkeypatch.setattr(api, "expansion_pays", rule)
    monkeypatch.setattr(api, "config_for", lambda chip, form, *_: small[form])
    monkeypatch.setattr(api.expanded, "attend", marked)
    got, want = run_with_weights("ragged", jnp.float32, jitted=False, backend="triton", chip="h200", interpret=True)
    jax.effects_barrier()
    assert within(tuple(np.asarray(x) for x in got), want, "float32")
    assert ran == ["expanded"] * pays
    ((call, chip, pairs, tokens),) = asked
    sees = [kept - i for kept, rows in RAGGED for i in range(rows)]
    blocks = sum(-(-kept // 16) for kept, _ in RAGGED)
    assert (chip, pairs, tokens) == ("h200", sum(sees), -(-blocks // 4) * 64)
    assert (call.nope, call.value, call.rotary) == (NOPE, VALUE, PROBLEMS["ragged"][0].rotary)


@pytest.mark.slow
def test_the_absorbed_form_projects_in_and_out_of_latent_space():
    got, want = run_with_weights("ragged", jnp.float32, form="absorbed", backend="triton", config=WHOLE, interpret=True)
    assert within(got, want, "float32")


def seeing(change: Any) -> Any:
    """A mutant whose rows see other tokens: `change` maps (seen i32[R], tile) to what they see."""

    def mutant(name: str) -> tuple[np.ndarray, np.ndarray]:
        (case, prompts), (given, _, _) = PROBLEMS[name], problem(name)
        finite = np.nan_to_num(given.rows)
        return reference(case, given._replace(held=change(given.held, prompts.tile), rows=finite))

    return mutant


def changed(change: Any) -> Any:
    """A mutant of what comes out, from (case, given, tiles)."""
    return lambda name: change(PROBLEMS[name][0], *problem(name)[:2])


def whole_tile(seen: np.ndarray, tile: int) -> np.ndarray:
    return np.where(seen > 0, np.repeat(seen.reshape(-1, tile).max(1), tile), 0)


# Bugs a kernel could have. The tolerance is fit for use only while it rejects them all.
MUTANTS = {
    "itself unseen": seeing(lambda seen, _: np.where(seen > 1, seen - 1, seen)),
    "sees the next": seeing(lambda seen, _: np.where(seen > 0, seen + 1, 0)),
    "not causal inside a tile": seeing(whole_tile),
    "first row's mask for all": seeing(lambda seen, tile: np.where(seen > 0, np.repeat(seen[::tile], tile), 0)),
    "first block lost": changed(lambda c, x, t: reference(c, x, lambda at, n: (at < n) & ((at >= 16) | (n <= 16)))),
    "last block lost": seeing(lambda seen, _: np.where(seen > 16, (seen - 1) // 16 * 16, seen)),
    "pages of another sequence": changed(
        lambda c, x, t: reference(c, x._replace(pages=np.roll(x.pages, 32, 0), rows=np.nan_to_num(x.rows)))
    ),
    "heads and rows mixed up": changed(
        lambda c, x, t: reference(
            c, x._replace(q=x.q.reshape(-1, 16, c.heads, x.q.shape[-1]).swapaxes(1, 2).reshape(x.q.shape))
        )
    ),
    "parts merged by their mean": changed(lambda c, x, t: reference(c, x, parts=2)),
    "scale wrong": changed(lambda c, x, t: reference(c, x, scale=1.05)),
    "base 2": changed(lambda c, x, t: (reference(c, x)[0], reference(c, x)[1] * np.log2(np.e))),
    "padding not empty": changed(lambda c, x, t: tuple(np.nan_to_num(part, neginf=-1e30) for part in reference(c, x))),
    "values shifted": changed(lambda c, x, t: tuple(np.roll(part, 1, -1) for part in reference(c, x))),
    "free pages read": changed(lambda c, x, t: (reference(c, x)[0] + np.nan, reference(c, x)[1])),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("kind", TOLERANCE)
def test_the_tolerance_rejects(mutant, kind):
    name = "fp8" if kind.startswith("fp8") else "ragged"
    want = problem(name)[2]
    assert within(want, want, kind)
    assert not within(MUTANTS[mutant](name), want, kind)


@pytest.mark.slow
@settings(max_examples=8)
@draw(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 16)), min_size=3, max_size=3), st.sampled_from([WHOLE, SPLIT])
)
def test_any_mix_of_lengths_is_softmax_attention(mix, config):
    """One program for all of them: shapes do not depend on lengths."""
    prompts = Prompts(sequences=tuple((history, min(rows, history)) for history, rows in mix))
    case = Case(lengths=(), heads=2)
    given, tiles = make_tiles(case, prompts)
    pages = np.zeros((3, 16), np.int32)
    pages[:, : tiles.pages.shape[1]] = tiles.pages
    pool = np.full((48, *given.pool.shape[1:]), np.nan, np.float32)
    pool[: len(given.pool)] = given.pool
    got = _any_mix(config)(given.q, pool, pages, tiles.seen)
    assert within(got, reference(case, given), "float32")


@cache
def _any_mix(config: TileConfig) -> Any:
    return jax.jit(partial(mla_prefill, tile=16, value_width=32, backend="triton", config=config, interpret=True))


def arguments(**changes: Any) -> dict[str, Any]:
    sizes = {"q": (32, 4, 48), "pool": (5, 4, 48), "pages": (2, 3), "seen": (32,)} | changes
    dtypes = {"pages": jnp.int32, "seen": jnp.int32, "sequence": jnp.int32}
    return {name: jnp.zeros(size, dtypes.get(name, jnp.bfloat16)) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("changes", "options", "error", "words"),
    [
        (
            {"pool": (5, 4, 40)},
            {},
            ValueError,
            "queries of 48 columns need bfloat16 rows of 48, but the pool's have 40",
        ),
        ({"seen": (30,)}, {}, ValueError, "2 tiles of 16 rows, but 32 queries and 30 counts of what they see"),
        ({"sequence": (3,)}, {}, ValueError, "3 tiles of 16 rows, but 32 queries"),
        ({}, {"value_width": 48}, ValueError, "latent width 48 is not inside the row of 48 columns"),
        ({}, {"form": "dense"}, ValueError, "mla_prefill has no form 'dense'; it has: absorbed, expanded"),
        ({}, {"form": "expanded"}, ValueError, "makes keys and values of the latents: give w_uk and w_uv"),
        ({"w_uk": (4, 32, 16)}, {}, ValueError, "w_uk and w_uv go together: one of them is missing"),
        (
            {"w_uk": (4, 24, 16), "w_uv": (4, 16, 24)},
            {},
            ValueError,
            r"4 heads and 32 latent columns, but w_uk of \(4, 24, 16\) and w_uv of \(4, 16, 24\)",
        ),
        ({}, {"backend": "cuda"}, ValueError, "mla_prefill has no backend 'cuda'; it has: triton, ref"),
        ({}, {"chip": "v5e"}, ValueError, "no chip 'v5e' is known; known are: h100, h200, b200"),
        ({}, {"backend": "triton"}, ValueError, r"triton needs to know its GPU: name a chip \(h100, h200, b200\)"),
        ({}, {"backend": "triton", "chip": "h200", "value_width": 24}, NotImplementedError, "the latent width is 24"),
        (
            {},
            {"backend": "triton", "chip": "h100"},
            NotImplementedError,
            r"mla_prefill/tuning\.json has no absorbed configuration for plain rows on h100",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes, options, error, words):
    with pytest.raises(error, match=words):
        mla_prefill(**arguments(**changes), **{"value_width": 32, "tile": 16} | options)


def test_float32_rows_go_to_the_reference_on_a_gpu():
    assert within(run("ragged", jnp.float32, chip="h200"), problem("ragged")[2], "float32")
    with pytest.raises(NotImplementedError, match="float32 rows do not fit in shared memory: give BF16 or FP8"):
        run("ragged", jnp.float32, chip="h200", backend="triton")
