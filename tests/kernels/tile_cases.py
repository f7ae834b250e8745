"""Prompt rows in tiles over paged histories, for the tests of prefill, on top of `mla_cases`."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from tests.kernels.mla_cases import Case, Given, make


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Sequences of (tokens of history, new rows at its end); 0 rows are a tile of padding."""

    sequences: tuple[tuple[int, int], ...]
    tile: int = 16


class Tiles(NamedTuple):
    """What a kernel is handed besides queries and pool, in numpy."""

    pages: np.ndarray  # i32[S, W]
    sequence: np.ndarray  # i32[T]
    seen: np.ndarray  # i32[R]


def lay_out(prompts: Prompts, pages: np.ndarray) -> Tiles:
    """Every sequence's rows into tiles of its own, in order."""
    sequence, seen = [], []
    for s, (history, rows) in enumerate(prompts.sequences):
        for begin in range(0, max(rows, 1), prompts.tile):
            mine = np.zeros(prompts.tile, np.int32)
            new = np.arange(begin, min(begin + prompts.tile, rows))
            mine[: len(new)] = history - rows + new + 1
            sequence.append(s)
            seen.append(mine)
    return Tiles(pages, np.asarray(sequence, np.int32), np.concatenate(seen))


def make_tiles(case: Case, prompts: Prompts, seed: int = 0) -> tuple[Given, Tiles]:
    """The pool of `case` with the prompts' histories, and by row what `mla_cases.reference` takes of every row."""
    stored = make(replace(case, lengths=tuple(history for history, _ in prompts.sequences)), seed)
    tiles = lay_out(prompts, stored.pages)
    rng = np.random.default_rng(seed + 1)
    columns = case.latent + case.rotary
    q = rng.normal(0, 0.6 * (32 / case.latent) ** 0.5, (len(tiles.seen), case.heads, columns))
    q = np.array(jnp.asarray(q, jnp.bfloat16).astype(jnp.float32))
    of_row = np.repeat(tiles.sequence, prompts.tile)
    return Given(q, stored.rows, stored.pool, stored.pages[of_row], tiles.seen), tiles
