"""The rows and histories of one step, as plain arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splash_jax.errors import RequestError

MOST_REQUESTS = 10**7


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Requests of one step. All arrays i64[B], one entry per request.

    A decode step has one new row each, a prefill step a chunk of a prompt each, a mixed step both.
    """

    context: np.ndarray  # tokens of the history once the step has run, its new rows included
    new_rows: np.ndarray  # query rows in this step
    home: np.ndarray  # rank that owns the history where the layout has owners

    def __post_init__(self) -> None:
        arrays = (self.context, self.new_rows, self.home)
        if any(a.ndim != 1 or a.dtype.kind not in "iu" for a in arrays) or len({a.shape for a in arrays}) > 1:
            told = ", ".join(f"{a.dtype}{list(a.shape)}" for a in arrays)
            raise RequestError(f"a load has three arrays of integers of one length; got {told}.")
        if len(self.context) and not (self.home.min() >= 0 and self.new_rows.min() >= 0):
            raise RequestError(f"home {self.home.min()} or new_rows {self.new_rows.min()} of a load is negative.")
        if (self.new_rows > self.context).any():
            i = int(np.argmax(self.new_rows > self.context))
            raise RequestError(
                f"request {i} of a load has {self.new_rows[i]} new rows and a context of {self.context[i]} tokens, "
                "which counts them too; count them in."
            )

    def __len__(self) -> int:
        return len(self.context)

    @classmethod
    def decode(cls, context: Sequence[int] | np.ndarray, ranks: int) -> "Load":
        """One row of every request, homes dealt out round-robin over `ranks`."""
        context = np.asarray(context, np.int64)
        _check(len(context), ranks)
        return cls(context, np.ones_like(context), np.arange(len(context)) % ranks)

    @classmethod
    def balanced(cls, batch: int, context: int, ranks: int, new_rows: int = 1) -> "Load":
        """`batch` requests alike, homes dealt out round-robin over `ranks`."""
        _check(batch, ranks)
        return cls(np.full(batch, context), np.full(batch, new_rows), np.arange(batch) % ranks)

    def pairs(self) -> np.ndarray:
        """Query-key pairs of each request: every new row sees the history up to itself. f64[B]."""
        return self.new_rows * (self.context - (self.new_rows - 1) * 0.5)

    def by_home(self, ranks: int) -> np.ndarray:
        """Sums over the requests at home on each rank: rows, requests with rows, context tokens, pairs. f64[ranks, 4].

        Longer than `ranks` where a home is not one of them.
        """
        sums = [
            np.bincount(self.home, weights, ranks)
            for weights in (self.new_rows, self.new_rows > 0, self.context, self.pairs())
        ]
        return np.array(sums).T


def _check(batch: int, ranks: int) -> None:
    if not 0 <= batch <= MOST_REQUESTS or ranks < 1:
        raise RequestError(
            f"a load is of 0 to {MOST_REQUESTS} requests over 1 rank or more, not of {batch} over {ranks}."
        )
