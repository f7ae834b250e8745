"""A warpgroup that makes BF16 of FP8 rows: from device memory through registers into shared memory.

Rows are asked for twice: blocks ahead of their use TMA brings them to L2, pieces ahead of it they are loaded. A piece
is small, since those that are on their way lie in registers. Where a piece goes is the kernel's own: it hands over the
parts of a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import GROUP
from pallas_kernels.mla_decode.mosaic import COLUMNS, TOKENS, laid, load, over

PIECE = 32  # tokens that are loaded together, GROUP columns or the rotary ones of each
BLOCKS_AHEAD = 2  # on their way to L2
PIECES_AHEAD = 3  # on their way to registers


def _by_token(columns: int) -> Any:
    """Registers of [tokens, columns]: a warp has two tokens of eight, and 16 lanes share a token's columns evenly."""
    tiling = plgpu.Tiling(((8, columns), (2, columns), (columns // 16,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


# By the columns of a store: 16 and 8 bytes of BF16 a lane, and no two of a row meet in a bank.
LAYOUTS = {columns: _by_token(columns) for columns in (GROUP, COLUMNS)}


def nothing(*_: Any) -> None:
    """Of a part that neither waits nor tells."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Columns of every row, and what is done with those of a block: of the program's `nth`, wherever it stands."""

    group: Any  # the number of a group of latent columns; None for the rotary ones
    width: int  # columns that `put` takes at once, of LAYOUTS
    put: Callable[[Any, Any, int, jax.Array], None]  # nth, tokens, first of the part's columns, BF16 numbers
    before: Callable[[Any], None] = nothing  # nth: waits until there is room
    after: Callable[[Any, Any], None] = nothing  # nth, tokens that exist from its first on: everything has been put


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Converter:
    """What is the same for every block of an item."""

    pool: Any  # refs of the three views that `Fp8Views` names
    pages: Any  # ref, i32[B, W]
    row: jax.Array  # of `pages`
    length: jax.Array  # of the row's history
    page_size: int
    value_width: int
    rotary: int  # columns
    interpreted: bool

    def run(self, begin: jax.Array, end: jax.Array, parts: Sequence[Part], nth0: jax.Array) -> None:
        """Every block from `begin` to `end`, part by part.

        Args:
          nth0: blocks that the program has had before.
        """
        pieces = [(part, first) for part in parts for first in range(0, TOKENS, PIECE)]

        def block(i: jax.Array, carry: Any) -> Any:
            places, found = carry
            nth = nth0 + (i - begin)
            pl.when(i + BLOCKS_AHEAD < end)(lambda: self._to_l2(self._places(i + BLOCKS_AHEAD)))
            following = self._places(jnp.minimum(i + 1, end - 1))

            for n, (part, first) in enumerate(pieces):
                later = n + PIECES_AHEAD
                found += (self._fetch(places if later < len(pieces) else following, *pieces[later % len(pieces)]),)
                if first == 0:
                    part.before(nth)
                self._put(found[0], part, first, nth)
                found = found[1:]
                if first + PIECE == TOKENS:
                    part.after(nth, self.length - i * TOKENS)
            return following, found

        @pl.when(end > begin)
        def _() -> None:
            places = self._places(begin)
            for ahead in range(BLOCKS_AHEAD):
                pl.when(begin + ahead < end)(lambda ahead=ahead: self._to_l2(self._places(begin + ahead)))
            found = tuple(self._fetch(places, *piece) for piece in pieces[:PIECES_AHEAD])
            lax.fori_loop(begin, end, block, (places, found))

    def _places(self, block: jax.Array) -> tuple[jax.Array, ...]:
        """The pages that a block's tokens lie in; of one longer than a block the first slot too."""
        firsts = [block * TOKENS + first for first in range(0, TOKENS, min(self.page_size, TOKENS))]
        known = [jnp.minimum(token, self.length - 1) for token in firsts]  # a page without tokens is never read
        found = [self.pages[self.row, lax.div(token, self.page_size)] for token in known]
        return (*found, lax.rem(firsts[0], self.page_size)) if self.page_size > TOKENS else tuple(found)

    def _runs(self, places: tuple[jax.Array, ...], first: int, count: int) -> list[tuple[int, jax.Array, Any]]:
        """(token, page, slots) of the tokens of a block from `first` on that lie side by side, `count` in all."""
        if self.page_size > TOKENS:
            return [(first, places[0], pl.ds(places[1] + first, count))]
        size = min(self.page_size, count)
        return [
            (token, places[token // self.page_size], pl.ds(token % self.page_size, size))
            for token in range(first, first + count, size)
        ]

    def _to_l2(self, places: tuple[jax.Array, ...]) -> None:
        """Where TMA can address the rows: 16 bytes' multiples, and no more than 256 elements of them."""
        width = self.pool.scales.shape[-1]
        if width % 4 or width > 256:
            return
        for _, page, slots in self._runs(places, 0, TOKENS):
            plgpu.async_prefetch(self.pool.scales.at[page, slots])

    def _fetch(self, places: tuple[jax.Array, ...], part: Part, first: int) -> list[Any]:
        """A piece on its way to registers, by runs: its columns as they are stored, and the scales of a group."""
        layout = LAYOUTS[part.width]
        groups = self.value_width // GROUP
        if part.group is None:
            view, begin = self.pool.rotary, (self.value_width + 4 * groups) // 2
        else:
            view, begin = self.pool.latent, part.group * GROUP

        def of_run(page: jax.Array, slots: Any) -> Any:
            columns = (pl.ds(begin + column, part.width) for column in self._columns(part))
            values = [load(view.at[page, slots, own], layout) for own in columns]
            if part.group is None:
                return values, None
            return values, load(self.pool.scales.at[page, slots, self.value_width // 4 + part.group], layout.reduce(1))

        return [of_run(page, slots) for _, page, slots in self._runs(places, first, PIECE)]

    def _columns(self, part: Part) -> range:
        """The first columns of a part's stores."""
        return range(0, self.rotary if part.group is None else GROUP, part.width)

    def _put(self, found: list[Any], part: Part, first: int, nth: Any) -> None:
        """What `_fetch` found: the product of value and scale is rounded once."""
        size = min(self.page_size, PIECE)
        for n, (values, scale) in enumerate(found):
            tokens = pl.ds(first + n * size, size)
            for column, numbers in zip(self._columns(part), values, strict=True):
                if scale is not None:
                    scales = laid(over(scale, shape=numbers.shape), LAYOUTS[part.width], self.interpreted)
                    numbers = (numbers.astype(jnp.float32) * scales).astype(jnp.bfloat16)
                part.put(nth, tokens, column, numbers)
