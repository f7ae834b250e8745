"""Measured throughput of fixed layouts, rules that choose one from a batch's shape, and what their choices lose."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from splash_jax.cost.batches import BatchConstants, Fit, batch_seconds, describes, fit_batches
from splash_jax.errors import ConfigError
from splash_jax.fields import csv_rows, number, tokens
from splash_jax.ownership import Layout

OUTPUT = 1024  # tokens that every request of the paper's tables generates


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Table:
    """Throughput of some layouts at some positions. Rows may repeat a position: they were measured twice."""

    layouts: tuple[str, ...]
    inputs: np.ndarray  # i64[n]: input tokens of a request
    batches: np.ndarray  # i64[n]: requests
    throughput: np.ndarray  # f64[n, layouts]: 1000 tokens per second, input and output together

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def seconds(self) -> np.ndarray:
        """Seconds of a batch end to end. f64[n, layouts]."""
        return (self.batches * (self.inputs + OUTPUT))[:, None] / self.throughput / 1e3

    @property
    def positions(self) -> np.ndarray:
        """A number for each row, equal for rows of one position. i64[n]."""
        shapes = np.stack([self.inputs, self.batches], 1)
        return np.unique(shapes, axis=0, return_inverse=True)[1].ravel()

    def rows(self, which: np.ndarray) -> "Table":
        return Table(
            layouts=self.layouts, inputs=self.inputs[which], batches=self.batches[which],
            throughput=self.throughput[which],
        )  # fmt: skip


def read_table(path: Path) -> Table:
    """A CSV file with columns `input_len`, `B` and one per layout; `sweep` is read over. Raises ConfigError."""
    lines = list(csv_rows(path, ("input_len", "B")))
    if not lines:
        raise ConfigError(f"{path}: has no rows.")
    columns = list(lines[0][1])
    layouts = tuple(c for c in columns if c not in ("sweep", "input_len", "B"))
    if len(layouts) < 2:
        raise ConfigError(f"{path}: has columns {columns}; needed are input_len, B and two layouts or more.")
    values = []
    for at, line in lines:
        try:
            sizes = [float(tokens(line[column])) for column in ("input_len", "B")]
            row = [*sizes, *(number(line[column]) for column in layouts)]
        except ValueError as error:
            raise ConfigError(f"{path}: line {at} has something else than numbers: {error}") from None
        if min(row) <= 0:
            raise ConfigError(f"{path}: line {at} has numbers that are not above 0: {line}; leave such lines out.")
        values.append(row)
    array = np.array(values)
    return Table(
        layouts=layouts, inputs=array[:, 0].astype(np.int64), batches=array[:, 1].astype(np.int64),
        throughput=array[:, 2:],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a rule's choices lose. Regret: the share of the best layout's throughput that the chosen one lacks."""

    agreement: float  # share of rows where it chooses the best
    mean_regret: float
    worst_regret: float


def score(table: Table, chosen: np.ndarray) -> Score:
    """The score of a choice of columns, i64[n]."""
    best = table.throughput.max(1)
    regret = 1 - table.throughput[np.arange(len(table)), chosen] / best
    return Score(
        agreement=float((regret == 0).mean()), mean_regret=float(regret.mean()), worst_regret=float(regret.max())
    )


Rule = Callable[[Table, Table], np.ndarray]  # (what it may learn from, what it chooses for) -> columns


def hold_out(table: Table, rule: Rule) -> np.ndarray:
    """A rule's choices when each position is left out of what it learns from, all its rows together. i64[n]."""
    chosen = np.zeros(len(table), np.int64)
    positions = table.positions
    for position in np.unique(positions):
        out = positions == position
        chosen[out] = rule(table.rows(~out), table.rows(out))
    return chosen


def always(name: str) -> Rule:
    return lambda _, table: np.full(len(table), table.layouts.index(name))


def nearest_neighbour(known: Table, table: Table) -> np.ndarray:
    """The best layout of the nearest known position, in doublings of length and batch."""
    at = lambda t: np.log2(np.stack([t.inputs, t.batches], 1))  # noqa: E731
    distance = ((at(table)[:, None] - at(known)[None]) ** 2).sum(-1)
    return known.throughput.argmax(1)[distance.argmin(1)]


THRESHOLDS = (92.7e3, 1.48e6, 5.93e6)  # input tokens of a batch; set by hand on Table 4
FEW = 8  # requests, below which a rank would be idle


def thresholds(order: Sequence[str], few: str) -> Rule:
    """The rule of a sceptic: `order[i]` up to the i-th of THRESHOLDS; below FEW requests `few` but for the first."""

    def choose(_: Table, table: Table) -> np.ndarray:
        step = np.searchsorted(THRESHOLDS, table.inputs * table.batches)
        columns = np.array([table.layouts.index(name) for name in order])[step]
        owned = np.isin(step, [1, 3])
        return np.where((table.batches < FEW) & owned, table.layouts.index(few), columns)

    return choose


def cost_model(layouts: Mapping[str, Layout], guess: BatchConstants | None = None, how: Fit | None = None) -> Rule:
    """The layout that the fitted form of `batches` calls fastest."""
    describes(layouts)

    def choose(known: Table, table: Table) -> np.ndarray:
        made = fit_table(known, layouts, guess, how)
        return price(table, layouts, made).argmin(1)

    return choose


def fit_table(
    table: Table, layouts: Mapping[str, Layout], guess: BatchConstants | None = None, how: Fit | None = None
) -> BatchConstants:
    """The form's constants, fitted to a table."""
    columns = [layouts[name] for name in table.layouts]
    return fit_batches(table.seconds, columns, table.inputs, table.batches, OUTPUT, guess=guess, how=how)


def price(table: Table, layouts: Mapping[str, Layout], constants: BatchConstants) -> np.ndarray:
    """Predicted seconds at a table's positions. f64[n, layouts]."""
    columns = [layouts[name] for name in table.layouts]
    return batch_seconds(constants, columns, table.inputs, table.batches, OUTPUT)
