"""Room for rows in a step, per owner group."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Rows that one owner group has room for in a step: `decode` single rows, then `tiles` tiles of `tile` rows."""

    decode: int
    tiles: int
    tile: int

    @property
    def rows(self) -> int:
        return self.decode + self.tiles * self.tile

    @property
    def single_rows(self) -> int:
        """Rows, the first ones, that are a sequence each: a tile of one row is no different from a single row."""
        return self.rows if self.tile == 1 else self.decode

    @property
    def sequences(self) -> int:
        """Runs of rows of one request: at most one row of each is sampled."""
        return self.decode + self.tiles

    def __str__(self) -> str:
        return f"{self.decode}+{self.tiles}x{self.tile}"


def switch_buckets(buckets: Sequence[Bucket]) -> Sequence[Bucket]:
    """Of a layout's buckets, smallest first, those of steps with a switch: all single rows, and the largest.

    Two, so that a switch between decode steps pays for no prompt rows and programs stay few.
    """
    return buckets[-2:]
