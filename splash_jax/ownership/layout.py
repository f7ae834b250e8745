"""A layout as a value: which placement every axis of the attention mesh has.

Everything else about state is derived from two facts per axis (arXiv 2609.37626, section 2): are the attention
projections split by head over it, and which of its ranks hold a request's history. Ranks are numbered row-major
over the axes, as `jax.sharding.Mesh.devices.flat` numbers them.
"""

import enum
import functools
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class Projections(enum.Enum):
    """Where the attention projections of one axis live."""

    SPLIT = "split"
    WHOLE = "whole"


class History(enum.Enum):
    """Which ranks of one axis hold a request's history."""

    ALL = "all"
    REQUEST = "request"
    POSITION = "position"


@dataclass(frozen=True, slots=True)
class Placement:
    """One cell of the grid of roles."""

    projections: Projections
    history: History


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of the attention mesh, the role it plays, and what that role says about state."""

    name: str
    size: int
    role: str
    placement: Placement

    def __hash__(self) -> int:
        """Layouts key what is looked up in every step; enums would hash ten times slower."""
        return hash((self.name, self.size, self.role))


def _derived() -> Any:
    """A fact that follows from the axes: worked out once, for those who ask for every request in every step."""
    return field(init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Layout:
    """A placement for every axis of the mesh. Two layouts are equal when their axes, sizes and roles are."""

    axes: tuple[Axis, ...]
    size: int = _derived()  # number of ranks, T
    head_shards: int = _derived()
    owner_groups: int = _derived()  # groups of ranks that own disjoint requests
    position_shares: int = _derived()  # shares that the positions of one history are dealt into
    kernel_shards: int = _derived()  # parts that heads stay cut into where they meet histories

    def __post_init__(self) -> None:
        for name, axes in (
            ("size", self.axis_names), ("head_shards", self.head_axes), ("owner_groups", self.owner_axes),
            ("position_shares", self.position_axes), ("kernel_shards", self._cut_to_the_end),
        ):  # fmt: skip
            object.__setattr__(self, name, math.prod(axis.size for axis in self.axes if axis.name in axes))

    def __str__(self) -> str:
        if len(self.axes) == 1:
            return self.axes[0].role
        return ",".join(f"{axis.name}={axis.role}" for axis in self.axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def head_axes(self) -> tuple[str, ...]:
        """Axes over which the projections are split by head."""
        return tuple(a.name for a in self.axes if a.placement.projections is Projections.SPLIT)

    @property
    def owner_axes(self) -> tuple[str, ...]:
        """Axes over which a history has one owner."""
        return tuple(a.name for a in self.axes if a.placement.history is History.REQUEST)

    @property
    def position_axes(self) -> tuple[str, ...]:
        """Axes over which the positions of a history are dealt out."""
        return tuple(a.name for a in self.axes if a.placement.history is History.POSITION)

    @property
    def _cut_to_the_end(self) -> tuple[str, ...]:
        """Axes over which heads are split and stay so: every rank of them holds every history."""
        others = (*self.owner_axes, *self.position_axes)
        return tuple(name for name in self.head_axes if name not in others)

    @property
    def attends_locally(self) -> bool:
        """Whether attention exchanges nothing: a rank's own heads meet whole histories on it."""
        return self.kernel_shards == self.head_shards and self.position_shares == 1

    @property
    def everywhere(self) -> bool:
        """Whether every rank holds every history."""
        return self.owner_groups == 1 and self.position_shares == 1

    def group_of(self, rank: int) -> int:
        """Owner group of a rank: 0 <= group < owner_groups."""
        return self.index(rank, self.owner_axes)

    def share_of(self, rank: int) -> int:
        """Share of positions that a rank holds: 0 <= share < position_shares."""
        return self.index(rank, self.position_axes)

    def holders(self, home: int) -> tuple[int, ...]:
        """Ranks that hold some of the history of a request whose home is `home`."""
        group = self.group_of(home)
        return tuple(rank for rank in range(self.size) if self.group_of(rank) == group)

    def lag(self, home: int, rank: int) -> int:
        """How many blocks of positions after `home` this rank's first block comes: it holds blocks lag, lag + n, ..."""
        return (self.share_of(rank) - self.share_of(home)) % self.position_shares

    def head_blocks(self) -> list[int]:
        """Of T blocks of heads, numbered like ranks: the order in which a weight's head dimension holds them.

        A rank holds the blocks whose numbers agree with its own in every axis that splits heads. So a switch never
        fetches heads along an axis that splits them before and after.
        """
        split = [i for i, axis in enumerate(self.axes) if axis.name in self.head_axes]
        whole = [i for i in range(len(self.axes)) if i not in split]
        blocks = np.arange(self.size).reshape([axis.size for axis in self.axes])
        return blocks.transpose(split + whole).ravel().tolist()

    def index(self, rank: int, names: Collection[str]) -> int:
        """A rank's number among those that differ in these axes only, row-major; equal for ranks that agree in them."""
        coordinates = np.unravel_index(rank, [axis.size for axis in self.axes])
        index = 0
        for coordinate, axis in zip(coordinates, self.axes, strict=True):
            if axis.name in names:
                index = index * axis.size + int(coordinate)
        return index


@functools.cache
def groups_of_ranks(layout: Layout) -> tuple[int, ...]:
    """`layout.group_of` of every rank; kept, for those who ask in every step."""
    return tuple(layout.group_of(rank) for rank in range(layout.size))


@functools.cache
def lags_of_holders(layout: Layout) -> tuple[dict[int, int], ...]:
    """For every home the ranks that hold some of its histories, and their `layout.lag`; kept."""
    return tuple({rank: layout.lag(home, rank) for rank in layout.holders(home)} for home in range(layout.size))
