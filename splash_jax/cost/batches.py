"""Seconds that a whole batch takes from its first prompt to its last token, with few constants that are fitted.

Measured tables (arXiv 2609.37626, Tables 4 and 5) give one number per layout, input length and batch: the throughput of
a batch end to end, prefill, queueing, transfer to the decode group and decode included. So the form is Eq. 10 summed
over a batch's steps, with N = B (L + output) tokens, and effective constants that its parts are read from:

    t = common + fixed + N (per_token + per_pair L) + idle + congestion

* `common`: what all layouts share, decode above all.
* `fixed`: what a layout's collectives cost however little there is to do.
* `per_token`: projections, experts and the exchanges that grow with rows. One constant where every rank has every
  history, one where positions are dealt out, one for both layouts with owners: their core work is the same.
* `per_pair`: attention over long histories; one constant where every rank has all of it, one where ranks share it.
* `idle`: the busiest owner has ceil(B / T) requests where B / T would be even; its rows and its pairs cost apart.
* `congestion`, of layouts with owners: whole projections slow down once many tokens are live, past a first depth; an
  exchange shows until the backlog is deep enough to hide it, past a second (the eta of Eq. 10).

The last two say in which direction a rate changes with depth, and by how much is fitted. Nothing asks for a role by
name: which constant applies follows from where projections and histories are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from scipy.optimize import minimize

from splash_jax.errors import ConfigError
from splash_jax.ownership import History, Layout, Projections

M = 1e6  # tokens: constants are per million


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConstants:
    """What is fitted. Seconds, millions of tokens, all above 0. The values are first guesses that favour no layout."""

    common: float = 25.0
    fixed_dealt: float = 3.0  # where positions are dealt out
    fixed_owned_whole: float = 3.0  # where histories have owners and projections are whole
    fixed_owned_split: float = 3.0  # ... and are split
    token_everywhere: float = 40.0  # where every rank has every history
    token_dealt: float = 40.0
    token_owned: float = 40.0
    pair_everywhere: float = 20.0
    pair_shared: float = 20.0
    idle_token: float = 40.0
    idle_pair: float = 800.0
    crowding: float = 10.0  # per token, of whole projections on owners
    exchange: float = 10.0  # per token, of split projections before owners
    crowded: float = 3.0  # depth at which half of the crowding has set in
    hidden: float = 3.0  # depth at which half of the exchange is hidden

    def scaled(self, seconds: float) -> "BatchConstants":
        """The same on a platform that takes so many times as long; depths stay."""
        depths = ("crowded", "hidden")
        return replace(self, **{f.name: getattr(self, f.name) * seconds for f in fields(self) if f.name not in depths})

    def vector(self) -> np.ndarray:
        return np.array([getattr(self, f.name) for f in fields(self)])


NAMES = tuple(f.name for f in fields(BatchConstants))


def batch_seconds(
    constants: BatchConstants, layouts: Sequence[Layout], inputs: np.ndarray, batches: np.ndarray, output: int
) -> np.ndarray:
    """Seconds of batches of `batches` requests of `inputs` tokens and `output` more, i64[n] each. f64[n, layouts]."""
    c = constants
    length = (inputs + output) / M
    N = batches * length
    found = []
    for layout in layouts:
        whole = layout.head_shards == 1
        groups = layout.owner_groups
        t = c.common + np.zeros(len(N))
        if layout.everywhere:
            t += N * (c.token_everywhere + c.pair_everywhere * length)
        elif groups == 1:
            t += c.fixed_dealt + N * (c.token_dealt + c.pair_shared * length)
        else:
            idle = (np.ceil(batches / groups) - batches / groups) * length
            t += c.fixed_owned_whole if whole else c.fixed_owned_split
            t += N * (c.token_owned + c.pair_shared * length) + idle * (c.idle_token + c.idle_pair * length)
            crowded = N**2 / (N**2 + c.crowded**2)
            exposed = c.hidden**2 / (N**2 + c.hidden**2)
            t += N * (c.crowding * crowded if whole else c.exchange * exposed)
        found.append(t)
    return np.stack(found, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How constants are fitted; none of it is fitted itself.

    What is minimised: the mean regret of a choice that is soft within `softness` of the best; the squared errors of
    the ratios between layouts, large ones counted less; a tenth of that for errors that all layouts share, which change
    no choice; and how far constants stray from the first guess, in logarithms.
    """

    softness: float = 0.03
    errors: float = 1.0
    shared: float = 0.1
    outlier: float = 0.05  # relative error from which on errors count linearly
    stray: float = 0.003


def fit_batches(
    seconds: np.ndarray,
    layouts: Sequence[Layout],
    inputs: np.ndarray,
    batches: np.ndarray,
    output: int,
    *,
    guess: BatchConstants | None = None,
    how: Fit | None = None,
) -> BatchConstants:
    """Constants fitted to measured seconds f64[n, layouts]. `guess` may come from another platform: it is scaled first.

    Raises ConfigError for times that are not finite and above 0.
    """
    how, guess = how or Fit(), guess or BatchConstants()
    if seconds.size == 0 or not np.isfinite(seconds).all() or seconds.min() <= 0:
        raise ConfigError("measured times must be finite and above 0, and there must be some; check the table.")
    logs = np.log(seconds)
    regrets = 1 - seconds.min(1, keepdims=True) / seconds
    priced = batch_seconds(guess, layouts, inputs, batches, output)
    start = np.log(guess.scaled(math.exp(float((logs - np.log(priced)).mean()))).vector())

    def badness(x: np.ndarray) -> float:
        made = BatchConstants(**dict(zip(NAMES, np.exp(np.clip(x, -20, 12)).tolist(), strict=True)))
        found = np.log(batch_seconds(made, layouts, inputs, batches, output))
        preference = -(found - found.min(1, keepdims=True)) / how.softness
        chosen = np.exp(preference)
        chosen /= chosen.sum(1, keepdims=True)
        error = found - logs
        common = error.mean(1, keepdims=True)
        bent = 2 * how.outlier**2 * (np.sqrt(1 + ((error - common) / how.outlier) ** 2) - 1)
        fit = bent.mean() + how.shared * (common**2).mean()
        return (chosen * regrets).sum(1).mean() + how.errors * fit + how.stray * ((x - start) ** 2).mean()

    best = minimize(badness, start, method="L-BFGS-B", options={"maxiter": 300, "maxfun": 20_000})
    return BatchConstants(**dict(zip(NAMES, np.exp(np.clip(best.x, -20, 12)).tolist(), strict=True)))


def describes(layouts: Mapping[str, Layout]) -> None:
    """Raise ConfigError for a layout that the form has no constants for: a mix of roles, or another role."""
    for name, layout in layouts.items():
        facts = {(axis.placement.projections, axis.placement.history) for axis in layout.axes}
        known = [
            (Projections.SPLIT, History.ALL), (Projections.WHOLE, History.POSITION),
            (Projections.WHOLE, History.REQUEST), (Projections.SPLIT, History.REQUEST),
        ]  # fmt: skip
        if len(facts) > 1 or not facts <= set(known):
            raise ConfigError(f"batches of layout {name} cannot be priced: no table has measured it.")
