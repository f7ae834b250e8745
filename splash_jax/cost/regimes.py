"""Which layout is fastest where, up to contexts of ten million tokens, and which wall stands there (Figures 1, 6, 7).

All of it asks one `StepModel`, with requests alike and homes dealt round-robin.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from splash_jax.cost.load import Load
from splash_jax.cost.room import Capacity
from splash_jax.cost.step import StepEstimate, StepModel
from splash_jax.cost.switch import SwitchModel, SwitchQuote
from splash_jax.errors import ConfigError
from splash_jax.ownership import Layout

CAPACITY = "KV capacity"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RegimeMap:
    """Steps of `batches` requests of `contexts` tokens in several layouts."""

    layouts: tuple[Layout, ...]
    contexts: np.ndarray  # i64[C]
    batches: np.ndarray  # i64[B]
    seconds: np.ndarray  # f64[C, B, layouts]
    fits: np.ndarray  # bool[C, B, layouts]

    @property
    def fastest(self) -> np.ndarray:
        """Index of the fastest layout that fits; -1 where none does. i64[C, B]."""
        return np.where(self.fits.any(-1), np.where(self.fits, self.seconds, np.inf).argmin(-1), -1)

    @property
    def lead(self) -> np.ndarray:
        """How much longer the second best that fits takes, as a share; inf where there is no second. f64[C, B]."""
        ordered = np.sort(np.where(self.fits, self.seconds, np.inf), -1)
        with np.errstate(invalid="ignore"):
            return np.where(np.isfinite(ordered[..., 0]), ordered[..., 1] / ordered[..., 0] - 1, np.nan)


def regime_map(
    steps: StepModel,
    capacities: Mapping[Layout, Capacity],
    contexts: Sequence[int],
    batches: Sequence[int],
    new_rows: int = 1,
) -> RegimeMap:
    """The map of steps with `new_rows` rows of each request. A layout without a capacity fits nowhere."""
    if not contexts or not batches or min(*contexts, *batches) < 1:
        raise ConfigError(
            f"a map needs contexts and batches, all of at least 1; got {list(contexts)[:8]} and {list(batches)[:8]}."
        )
    seconds = np.empty((len(contexts), len(batches), len(steps.layouts)))
    fits = np.zeros(seconds.shape, bool)
    for i, context in enumerate(contexts):
        for j, batch in enumerate(batches):
            load = Load.balanced(batch, context, steps.ranks, min(new_rows, context))
            for k, (layout, estimate) in enumerate(steps.seconds(load).items()):
                seconds[i, j, k] = estimate.seconds
                held = capacities.get(layout)
                fits[i, j, k] = held is not None and held.longest(batch, layout) >= context
    return RegimeMap(
        layouts=steps.layouts, contexts=np.asarray(contexts), batches=np.asarray(batches), seconds=seconds, fits=fits
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    """From `at` on (requests or tokens) `resource` is what takes longest; or, KV capacity, nothing more fits."""

    resource: str
    at: int


def wall_order(
    steps: StepModel,
    layout: Layout,
    held: Capacity | None,
    *,
    context: int | None = None,
    batch: int | None = None,
    most: int = 1 << 26,
) -> list[Wall]:
    """Which resource binds first, second and so on as the batch grows (`context` given) or the context (`batch` given).

    The last is KV capacity, where it is reached below `most`. Values are exact to one request or token.
    """
    if (context is None) == (batch is None):
        raise ConfigError(f"give a context or a batch, the other one grows; got {context} and {batch}.")
    if (given := context if batch is None else batch) is not None and given < 1:
        raise ConfigError(f"walls are of a context or a batch of at least 1; got {given}.")

    def ask(n: int) -> StepEstimate:
        load = (
            Load.balanced(n, context, steps.ranks) if context is not None else Load.balanced(batch or 1, n, steps.ranks)
        )
        return steps.seconds(load)[layout]

    def fits(n: int) -> bool:
        return held is not None and held.longest(n if batch is None else batch, layout) >= (context or n)

    most = min(most, 1 << 16) if context is not None else most
    if not fits(1):
        return [Wall(resource=CAPACITY, at=1)]
    last = most if fits(most) else _first(lambda n: not fits(n), 1, most)
    grid = sorted({*(int(2 ** (i / 4)) for i in range(int(4 * np.log2(max(last, 2))) + 1)), last})
    walls: list[Wall] = []
    for low, high in zip([1, *grid[:-1]], grid, strict=True):
        bound = ask(high).bound
        if not walls or bound != walls[-1].resource:
            start = high if not walls else _first(lambda n, b=bound: ask(n).bound == b, low, high)
            walls.append(Wall(resource=bound, at=start))
    return [*walls, Wall(resource=CAPACITY, at=last)] if last < most else walls


def _first(holds, low: int, high: int) -> int:
    """The least n in (low, high] that holds, where it holds from some n on and at `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Two layouts of requests of one length: one exchanges rows in every layer, the other keeps projections whole."""

    context: int
    slower_from: int | None  # requests from which on the exchange costs more time than it saves; None: not up to 16,384
    requests: tuple[int, int]  # that fit in each
    gain: float  # of steps full of requests: throughput of the first over that of the second, less 1


def break_even(
    steps: StepModel, capacities: Mapping[Layout, Capacity], exchanging: Layout, whole: Layout, context: int
) -> BreakEven:
    """When an exchange outweighs the memory that it returns.

    Splitting projections saves a step the reading of what others hold, and an exchange that grows with the batch takes
    it back: from `slower_from` requests on, a step of the same batch is slower (batches are asked one by one up to T,
    then in multiples of T, at which owners are even). What is left is room for more requests. `gain` weighs both, each
    layout with as many requests as it holds.
    """
    T, most = steps.ranks, 1 << 14

    def slower(batch: int) -> bool:
        found = steps.seconds(Load.balanced(batch, context, T))
        return found[exchanging].seconds > found[whole].seconds

    over = next(
        (n for n in [*range(1, T + 1), *(T * 2**i for i in range(1, int(np.log2(most // T)) + 1))] if slower(n)), None
    )
    if over is not None and over > T:
        over = T * _first(lambda n: slower(T * n), over // T // 2, over // T)
    requests, rates = [], []
    for layout in (exchanging, whole):
        held = capacities.get(layout)
        count = 0 if held is None else held.tokens // layout.owner_groups // context * layout.owner_groups
        requests.append(count)
        rates.append(count / steps.seconds(Load.balanced(count, context, T))[layout].seconds if count else 0.0)
    return BreakEven(
        context=context, slower_from=over, requests=(requests[0], requests[1]),
        gain=rates[0] / rates[1] - 1 if rates[1] else float("inf") if rates[0] else float("nan"),
    )  # fmt: skip


def switch_costs(
    switches: SwitchModel, batch: int, contexts: Sequence[int], new_rows: int = 1
) -> dict[tuple[Layout, Layout], list[SwitchQuote]]:
    """Quotes of every direction for `batch` requests of each context."""
    found: dict[tuple[Layout, Layout], list[SwitchQuote]] = {}
    for context in contexts:
        load = Load.balanced(batch, context, switches.steps.ranks, min(new_rows, context))
        for src in switches.steps.layouts:
            for dst, quote in switches.quotes(src, load).items():
                found.setdefault((src, dst), []).append(quote)
    return found
