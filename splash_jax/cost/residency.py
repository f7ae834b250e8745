"""How long requests of random lengths may be until they no longer fit together (arXiv 2609.37626, Appendix B.1)."""

from dataclasses import dataclass

import numpy as np

from splash_jax.errors import ConfigError
from splash_jax.ownership import Layout

LEAST_OUTPUT, MOST_OUTPUT = 512, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohorts:
    """Many batches of requests, drawn once and scaled to any nominal input length L.

    Inputs are uniform integers in [L // 2, L], outputs in [512, 1024], all independent; both are held whole.
    """

    where: np.ndarray  # f64[cohorts, B], in [0, 1): of the range of inputs
    output: np.ndarray  # i64[cohorts, B]: tokens

    @classmethod
    def draw(cls, batch: int, *, cohorts: int = 200_000, seed: int = 20260922) -> "Cohorts":
        """`cohorts` batches of `batch` requests, both at least 1, or `ConfigError`."""
        if batch < 1 or cohorts < 1:
            raise ConfigError(f"cohorts are drawn of 1 request or more, 1 or more of them; got {batch} and {cohorts}.")
        g = np.random.Generator(np.random.PCG64(seed))
        return cls(where=g.random((cohorts, batch)), output=g.integers(LEAST_OUTPUT, MOST_OUTPUT + 1, (cohorts, batch)))

    def tokens(self, nominal: int) -> np.ndarray:
        """Tokens of every request at a nominal input length. i64[cohorts, B]."""
        half = nominal // 2
        return half + np.floor(self.where * (nominal - half + 1)).astype(np.int64) + self.output


def needed_tokens(layout: Layout, tokens: np.ndarray) -> np.ndarray:
    """Tokens that the fullest rank holds of requests i64[cohorts, B], homes dealt round-robin. i64[cohorts].

    Positions that are dealt out are dealt out evenly.
    """
    groups = layout.owner_groups
    short = -tokens.shape[1] % groups
    padded = np.pad(tokens, ((0, 0), (0, short))) if short else tokens
    by_group = padded.reshape(len(tokens), -1, groups).sum(1)
    return -(-by_group.max(1) // layout.position_shares)


def nominal_limit(layout: Layout, pool: float, cohorts: Cohorts, *, resident: float = 0.99) -> int:
    """The longest nominal input length at which a share `resident` of the cohorts fits `pool` tokens per rank."""

    def fits(nominal: int) -> bool:
        return (needed_tokens(layout, cohorts.tokens(nominal)) <= pool).mean() >= resident

    if not fits(0):
        return 0
    # A request's tokens are nearly linear in the nominal length, so the limit is nearly known at once.
    share = np.quantile(needed_tokens(layout, cohorts.tokens(1 << 20)) / (1 << 20), resident)
    low, high = 0, max(1, int(pool / share))
    while fits(high):
        low, high = high, high + max(1, high // 64)
    if fits(near := high - high // 16):
        low = max(low, near)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
