"""How long the running requests will go on: from `max_tokens`, and from the lengths seen so far.

The survival function is Kaplan and Meier's on bins of a quarter octave: of all requests that reached a length, which
part went on. Requests that still run count as having got so far, so long ones are not forgotten while they run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

PER_OCTAVE = 4
BINS = 24 * PER_OCTAVE  # up to 16 M tokens
ENOUGH = 30  # ended requests before lengths say anything
SAMPLED = 256  # requests that an estimate looks at, evenly picked
FOREVER = 2**40  # a bound of a request that has none

_EDGES = np.floor(2 ** (np.arange(BINS + 1) / PER_OCTAVE))


@dataclass(frozen=True, slots=True, eq=False)
class Lifetimes:
    """Counts of output lengths: ended in each bin, or cut off in it (aborted, or ended by `max_tokens`). i64[BINS]."""

    ended: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))
    cut: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def finished(self, tokens: int, by_length: bool) -> "Lifetimes":
        """With one more finished request of so many output tokens; `by_length`: its limit ended it, not itself."""
        ended, cut = self.ended.copy(), self.cut.copy()
        (cut if by_length else ended)[_bins(np.array([tokens]))[0]] += 1
        return Lifetimes(ended, cut)

    def until_half(self, generated: Sequence[int] | np.ndarray, left: Sequence[int] | np.ndarray) -> float | None:
        """Steps until about half of the running requests will have ended; None when nothing is known.

        `generated` are their output tokens so far, `left` the most that each may still draw (`FOREVER` without limit).
        """
        generated, left = np.asarray(generated), np.asarray(left)
        if not len(generated):
            return None
        if self.ended.sum() < ENOUGH:
            half = float(np.sort(left)[(len(left) - 1) // 2])
            return half if half < FOREVER else None
        if len(generated) > SAMPLED:
            order = np.argsort(generated, kind="stable")
            pick = order[np.linspace(0, len(order) - 1, SAMPLED).astype(int)]
            generated, left = generated[pick], left[pick]
        alive = self._alive(generated)
        ahead = _EDGES[PER_OCTAVE : 22 * PER_OCTAVE : PER_OCTAVE // 2]
        now = alive[_bins(generated)]
        later = alive[_bins(generated[:, None] + ahead)] / now[:, None]
        expected = (later * (left[:, None] > ahead)).sum(0)
        gone = expected <= len(generated) / 2
        return float(ahead[int(gone.argmax())]) if gone.any() else None

    def _alive(self, running: np.ndarray) -> np.ndarray:
        """Part of requests that is still running at the start of each bin."""
        cut = self.cut + np.bincount(_bins(running), minlength=BINS)
        reached = np.cumsum((self.ended + cut)[::-1])[::-1]
        goes_on = 1 - np.where(reached > 0, self.ended / np.maximum(reached, 1), 0.0)
        alive = np.concatenate([[1.0], np.cumprod(goes_on)[:-1]])
        return np.maximum(alive, 1e-9)


def _bins(tokens: np.ndarray) -> np.ndarray:
    return np.clip(np.searchsorted(_EDGES, tokens, side="right") - 1, 0, BINS - 1)
