"""Decode and prefill over shared key heads against numpy float64, with tolerances that reject a kernel's bugs."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gqa_attention import TileConfig, gqa_attention
from tests.kernels.mla_cases import TOLERANCE, within
from tests.kernels.tile_cases import Prompts, lay_out


@dataclass(frozen=True, kw_only=True)
class Case:
    """Prompt rows, or decode rows where a tile is one row."""

    prompts: Prompts
    heads: int
    groups: int
    width: int = 16
    page_size: int = 4


class Given(NamedTuple):
    """What the kernel is handed, in numpy; pools are NaN wherever no token lies."""

    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    pages: np.ndarray  # of every tile
    seen: np.ndarray


DECODE = Prompts(sequences=((1, 1), (37, 1), (0, 0), (130, 1), (16, 1)), tile=1)
CASES = {
    "decode, groups of 4": Case(prompts=DECODE, heads=8, groups=2),
    "decode, one head a group": Case(prompts=DECODE, heads=3, groups=3, page_size=8),
    "decode, groups of 20": Case(prompts=DECODE, heads=20, groups=1, width=64, page_size=64),
    "prefill, groups of 4": Case(prompts=Prompts(sequences=((40, 24), (0, 0), (70, 5)), tile=8), heads=8, groups=2),
    "prefill, groups of 3": Case(prompts=Prompts(sequences=((33, 17), (5, 5)), tile=16), heads=6, groups=2, width=32),
}
SPLIT = TileConfig(block_lines=16, block_tokens=16, warps=4, stages=2, workers=24)
WHOLE = TileConfig(block_lines=16, block_tokens=16, warps=4, stages=2, workers=1)


@cache
def problem(name: str) -> tuple[Given, tuple[np.ndarray, np.ndarray]]:
    case, rng = CASES[name], np.random.default_rng(0)
    K, shape = case.page_size, (case.groups, case.width)
    needs = [-(-history // K) for history, _ in case.prompts.sequences]
    free = rng.permutation(sum(needs) + 2).tolist()
    pools = [np.full((len(free), K, *shape), np.nan, np.float32) for _ in range(2)]
    pages = np.full((len(needs), max(needs) + 1), free.pop(), np.int32)  # padding entries point at a page of NaN
    for s, (history, _) in enumerate(case.prompts.sequences):
        pages[s, : needs[s]] = [free.pop() for _ in range(needs[s])]
        for pool in pools:
            for token in range(history):
                pool[pages[s, token // K], token % K] = rng.normal(size=shape) * np.exp(rng.normal(0, 0.5))
    tiles = lay_out(case.prompts, pages)
    q = rng.normal(0, 0.8 * (16 / case.width) ** 0.5, (len(tiles.seen), case.heads, case.width))
    q, *pools = (np.array(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)) for x in (q, *pools))
    given = Given(q, pools[0], pools[1], pages[tiles.sequence], tiles.seen)
    return given, reference(case, given)


def reference(case: Case, given: Given, scale: float = 1.0, rolled: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Row by row in float64; `rolled` is the mutant that reads another key head."""
    R, H, D = given.q.shape
    out, lse = np.zeros((R, H, D)), np.full((R, H), -np.inf)
    for r in range(R):
        if given.seen[r] == 0:
            continue
        own = given.pages[r // case.prompts.tile]
        k, v = (pool[own].reshape(-1, *pool.shape[2:])[: given.seen[r]].astype(np.float64) for pool in given[1:3])
        for h in range(H):
            g = (h // (H // case.groups) + rolled) % case.groups
            scores = scale * k[:, g] @ given.q[r, h].astype(np.float64)
            top = scores.max()
            weights = np.exp(scores - top)
            out[r, h], lse[r, h] = weights @ v[:, g] / weights.sum(), np.log(weights.sum()) + top
    return out, lse


def run(name: str, dtype: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    given, _ = problem(name)
    attend = jax.jit(partial(gqa_attention, tile=CASES[name].prompts.tile, **options))
    q, keys, values = (jnp.asarray(x).astype(dtype) for x in given[:3])
    out, lse = attend(q, keys, values, given.pages, given.seen)
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    return np.asarray(out), np.asarray(lse)


@pytest.mark.parametrize(
    ("name", "dtype", "config"),
    [
        ("decode, groups of 4", "float32", SPLIT),
        ("prefill, groups of 3", "bfloat16", WHOLE),
        *(pytest.param(name, "bfloat16", SPLIT, marks=pytest.mark.slow) for name in CASES),
        *(pytest.param(name, "float32", WHOLE, marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_triton_is_softmax_attention(name, dtype, config):
    got = run(name, dtype, backend="triton", config=config, interpret=True)
    assert within(got, problem(name)[1], dtype)
    padding = problem(name)[0].seen == 0
    assert (got[0][padding] == 0).all() and (got[1][padding] == -np.inf).all()


@pytest.mark.parametrize("name", CASES)
def test_ref_is_softmax_attention(name):
    """Without a GPU it is what the op chooses, whatever the dtype."""
    assert within(run(name, "float32"), problem(name)[1], "float32")


def changed(**changes: Any) -> Any:
    """A mutant that is handed something else; free pages hold zeros, so that what it reads of them is a number."""

    def mutant(case: Case, given: Given) -> tuple[np.ndarray, np.ndarray]:
        finite = given._replace(keys=np.nan_to_num(given.keys), values=np.nan_to_num(given.values))
        return reference(case, finite._replace(**{name: change(given) for name, change in changes.items()}))

    return mutant


# Bugs a kernel could have. The tolerance is fit for use only while it rejects them all.
MUTANTS = {
    "itself unseen": changed(seen=lambda x: np.where(x.seen > 1, x.seen - 1, x.seen)),
    "sees the next": changed(seen=lambda x: np.where(x.seen > 0, x.seen + 1, 0)),
    "first row's mask for all": changed(seen=lambda x: np.where(x.seen > 0, np.repeat(x.seen[::8], 8), 0)),
    "one page lost": changed(pages=lambda x: np.concatenate([x.pages[:, 1:2], x.pages[:, 1:]], 1)),
    "keys for values": changed(values=lambda x: np.nan_to_num(x.keys)),
    "another key head": lambda case, x: reference(case, x, rolled=1),
    "scale wrong": lambda case, x: reference(case, x, scale=1.05),
    "heads in the other order": lambda case, x: tuple(part[:, ::-1] for part in reference(case, x)),
    "base 2": lambda case, x: (reference(case, x)[0], reference(case, x)[1] * np.log2(np.e)),
    "padding not empty": lambda case, x: tuple(np.nan_to_num(part, neginf=-1e30) for part in reference(case, x)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_the_tolerance_rejects(mutant, kind):
    assert kind in TOLERANCE
    name = "prefill, groups of 4"
    given, want = problem(name)
    assert within(want, want, kind)
    assert not within(MUTANTS[mutant](CASES[name], given), want, kind)


@pytest.mark.parametrize(
    ("changes", "options", "error", "words"),
    [
        (
            {"values": (5, 4, 3, 16)},
            {},
            ValueError,
            r"queries of 16 columns, but keys bfloat16\[5, 4, 2, 16\] and values",
        ),
        ({"q": (3, 7, 16)}, {}, ValueError, "7 query heads do not share 2 key heads alike"),
        ({"seen": (2,)}, {}, ValueError, "3 tiles of 1 rows, but 3 queries and 2 counts of what they see"),
        ({}, {"backend": "cuda"}, ValueError, "gqa_attention has no backend 'cuda'; it has: triton, ref"),
        ({}, {"chip": "v5e"}, ValueError, "no chip 'v5e' is known; known are: h100, h200, b200"),
        ({}, {"backend": "triton"}, ValueError, r"triton needs to know its GPU: name a chip \(h100, h200, b200\)"),
        (
            {"q": (3, 4, 24), "keys": (5, 4, 2, 24), "values": (5, 4, 2, 24)},
            {"backend": "triton", "config": WHOLE},
            NotImplementedError,
            "powers of two from 16: the key width is 24",
        ),
        (
            {},
            {"backend": "triton", "chip": "h100"},
            NotImplementedError,
            r"gqa_attention/tuning\.json has no triton configuration for bf16-16 rows on h100",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes, options, error, words):
    sizes = {"q": (3, 4, 16), "keys": (5, 4, 2, 16), "values": (5, 4, 2, 16), "pages": (3, 3), "seen": (3,)} | changes
    given = {n: jnp.zeros(size, jnp.int32 if n in ("pages", "seen") else jnp.bfloat16) for n, size in sizes.items()}
    with pytest.raises(error, match=words):
        gqa_attention(**given, **options)


def test_float32_keys_go_to_the_reference_on_a_gpu():
    name = "decode, groups of 4"
    assert within(run(name, "float32", chip="h200"), problem(name)[1], "float32")
    with pytest.raises(NotImplementedError, match="float32 keys do not fit in shared memory: give BF16 keys"):
        run(name, "float32", chip="h200", backend="triton", config=WHOLE)
