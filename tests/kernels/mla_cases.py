"""Paged MLA histories for the kernels' tests, their float64 attention, and how close a kernel must come to it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.mla_decode import Work, pack_fp8, unpack_fp8


@dataclass(frozen=True, kw_only=True)
class Case:
    """Decode rows over histories of `lengths` tokens."""

    lengths: tuple[int, ...]
    latent: int = 32
    rotary: int = 16
    heads: int = 16
    page_size: int = 4
    fp8: bool = False


class Given(NamedTuple):
    """What a kernel is handed, in numpy; the pool is NaN wherever no token lies."""

    q: np.ndarray  # f32[B, H, D], exact in bfloat16
    rows: np.ndarray  # f32[P, K, D]: what is stored, as numbers
    pool: np.ndarray  # the same as it is stored: f32, or u8 for FP8
    pages: np.ndarray
    held: np.ndarray


def make(case: Case, seed: int = 0) -> Given:
    """Queries and keys with spread; every number exact in bfloat16 or in the FP8 format."""
    rng = np.random.default_rng(seed)
    B, K, D = len(case.lengths), case.page_size, case.latent + case.rotary
    needs = [-(-n // K) for n in case.lengths]
    free = rng.permutation(sum(needs) + 2).tolist()
    rows = np.full((len(free), K, D), np.nan, np.float32)
    pages = np.full((B, max(1, *needs) + 1), free.pop(), np.int32)  # padding entries point at a page of NaN
    for b, (length, need) in enumerate(zip(case.lengths, needs, strict=True)):
        mine = [free.pop() for _ in range(need)]
        pages[b, :need] = mine
        flat = rows[mine].reshape(-1, D)
        flat[:length] = rng.normal(size=(length, D)) * np.exp(rng.normal(0, 0.5, (length, 1)))
        rows[mine] = flat.reshape(-1, K, D)
    q = rng.normal(0, 0.6 * (32 / case.latent) ** 0.5, (B, case.heads, D))
    q, rows = (np.array(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)) for x in (q, rows))
    pool = rows
    if case.fp8:
        holes = np.isnan(rows).any(-1, keepdims=True)
        packed = np.asarray(pack_fp8(jnp.asarray(np.nan_to_num(rows)), case.latent))
        pool = np.where(holes, np.uint8(0xFF), packed)  # NaN in FP8, in float32 and in bfloat16
        rows = np.where(holes, np.nan, np.asarray(unpack_fp8(jnp.asarray(packed), case.latent)))
    return Given(q, rows, pool, pages, np.asarray(case.lengths, np.int32))


# FP8 rows, for the kernels that make BF16 of them.
HOPPER_FP8 = {
    "pages of half a block": Case(lengths=(70, 0, 5, 130), latent=256, rotary=64, heads=64, page_size=32, fp8=True),
    "pages of two blocks": Case(lengths=(3, 130), latent=256, rotary=64, heads=20, page_size=128, fp8=True),
    "pages of an eighth": Case(lengths=(70,), latent=256, rotary=64, heads=65, page_size=8, fp8=True),
}
BLACKWELL_FP8 = {
    "FP8 in pages of half a block": Case(lengths=(64, 0, 130), latent=256, rotary=64, heads=20, page_size=32, fp8=True),
    "FP8 in pages of two blocks, 130 heads": Case(
        lengths=(250,), latent=256, rotary=64, heads=130, page_size=128, fp8=True
    ),
    "FP8 in pages of 8, a rotary width of two tiles": Case(
        lengths=(30, 64), latent=256, rotary=128, page_size=8, fp8=True
    ),
    "FP8, what the table is for": Case(lengths=(250,), latent=512, rotary=64, heads=20, page_size=64, fp8=True),
}


Seen = Callable[[np.ndarray, int], np.ndarray]


def reference(
    case: Case, given: Given, seen: Seen = np.less, scale: float = 1.0, parts: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Row by row in float64. `seen(token, length)` says which tokens a row sees; `parts` > 1 is the mutant that adds up
    that many equal parts without weighing them by their log-sum-exp.
    """
    B, H, D = given.q.shape
    out, lse = np.zeros((B, H, case.latent)), np.full((B, H), -np.inf)
    for b in range(B):
        keys = given.rows[given.pages[b]].reshape(-1, D).astype(np.float64)
        keys = keys[seen(np.arange(len(keys)), int(given.held[b]))]
        if not len(keys) or given.held[b] == 0:
            continue
        pieces = []
        for piece in np.array_split(keys, min(parts, len(keys))):
            scores = scale * given.q[b].astype(np.float64) @ piece.T
            top = scores.max(-1, keepdims=True)
            weights = np.exp(scores - top)
            pieces.append((weights @ piece[:, : case.latent] / weights.sum(-1, keepdims=True), top[:, 0]))
            lse[b] = np.logaddexp(lse[b], np.log(weights.sum(-1)) + top[:, 0])
        out[b] = np.mean([piece for piece, _ in pieces], 0)
    return out, lse


def in_blocks(case: Case, given: Given, work: Work) -> tuple[np.ndarray, np.ndarray]:
    """What a kernel over blocks has to come to if it rounds rows and probabilities to BF16 and nothing else: in
    float64, with a running maximum, item by item.
    """
    B, H, D = given.q.shape
    parts: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(B)]
    for row, begin, end, _ in np.asarray(work.items):
        keys = _rounded(given.rows[given.pages[row]].reshape(-1, D)[: given.held[row]])
        top, total, acc = np.full(H, -1e30), np.zeros(H), np.zeros((H, case.latent))
        for block in range(begin, end):
            mine = keys[block * work.block : (block + 1) * work.block]
            scores = given.q[row].astype(np.float64) @ mine.T * np.log2(np.e)
            new_top = np.maximum(top, scores.max(1))
            scale, p = np.exp2(top - new_top), np.exp2(scores - new_top[:, None])
            total = total * scale + p.sum(1)
            acc = acc * scale[:, None] + _rounded(p) @ mine[:, : case.latent]
            top = new_top
        if row >= 0 and end > begin:
            parts[row].append((acc / total[:, None], top / np.log2(np.e) + np.log(total)))
    out, lse = np.zeros((B, H, case.latent)), np.full((B, H), -np.inf)
    for row, own in enumerate(parts):
        if own:
            lse[row] = np.logaddexp.reduce([part_lse for _, part_lse in own])
            out[row] = sum(np.exp(part_lse - lse[row])[:, None] * part for part, part_lse in own)
    return out, lse


def _rounded(x: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32)).astype(np.float64)


# Largest error at the 50%, 99% and 100% quantile of all outputs, relative to 1 + |value|. BF16 rounds probabilities to
# 2^-9; where FP8 rows are scaled before a product, that rounds them too and moves a logit of 15 by 0.03. "in blocks" is
# of a kernel against `in_blocks`: a probability next to a boundary may be rounded otherwise.
TOLERANCE = {
    "float32": (2e-7, 4e-6, 1e-5),
    "bfloat16": (1e-4, 3e-3, 6e-3),
    "fp8": (1.5e-3, 2e-2, 7e-2),
    "fp8, unscaled": (8e-4, 5e-3, 1.2e-2),
    "in blocks": (2e-6, 5e-5, 2e-3),
}


def within(got: Any, want: tuple[np.ndarray, np.ndarray], kind: str) -> bool:
    """Infinities must lie alike; then all finite errors must pass each quantile."""
    errors = []
    for g, w in zip((np.asarray(x) for x in got), want, strict=True):
        if g.shape != w.shape or not np.array_equal(np.isfinite(g), np.isfinite(w)) or np.isnan(g).any():
            return False
        some = np.isfinite(w)
        errors.append((np.abs(g[some] - w[some]) / (1 + np.abs(w[some]))).ravel())
    flat = np.concatenate(errors)
    return all(np.quantile(flat, q) <= t for q, t in zip((0.5, 0.99, 1.0), TOLERANCE[kind], strict=True))
