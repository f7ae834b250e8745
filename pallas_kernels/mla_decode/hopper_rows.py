"""A warpgroup of `hopper_fp8` that makes BF16 of FP8 rows: from device memory through registers into shared memory.

Rows are asked for twice: blocks ahead of their use TMA brings them to L2, pieces ahead of it they are loaded. A piece
is small, since those that are on their way lie in registers.
"""

from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.formats import GROUP, Fp8Views
from pallas_kernels.mla_decode.mosaic import laid, load, over, zero_rows

TOKENS = 64  # of a block
COLUMNS = 64  # of BF16 that a row of a 128-byte swizzle holds
HALVES = 2  # of the latent columns in shared memory
PIECE = 32  # tokens that are loaded together, GROUP columns or the rotary ones of each
BLOCKS_AHEAD = 2  # on their way to L2
PIECES_AHEAD = 3  # on their way to registers


def _by_token(columns: int) -> Any:
    """Registers of [tokens, columns]: a warp has two tokens of eight, and 16 lanes share a token's columns evenly."""
    tiling = plgpu.Tiling(((8, columns), (2, columns), (columns // 16,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


LATENT, ROTARY = _by_token(GROUP), _by_token(COLUMNS)  # 16 and 8 bytes of BF16 a lane: no two of a row meet in a bank


def convert_rows(
    pages: Any, pools: Any, row: jax.Array, length: jax.Array, begin: jax.Array, end: jax.Array, nth0: jax.Array,
    *, page_size: int, value_width: int, rotary: int, interpreted: bool, latent: Any, rope: Any, here: Any, done: Any,
    **_: Any,
) -> None:  # fmt: skip
    """`bring` of `hopper_kernel.attend` for FP8 rows, of which `pools` are the views."""
    converter = Converter(
        pool=Fp8Views(*pools), pages=pages, row=row, length=length, page_size=page_size, value_width=value_width,
        rotary=rotary, interpreted=interpreted,
    )  # fmt: skip
    converter.run(begin, end, nth0, latent, rope, here, done)


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

    def run(
        self, begin: jax.Array, end: jax.Array, nth0: jax.Array, latent: Any, rope: Any, here: Any, done: Any
    ) -> None:
        """Every block from `begin` to `end`, as soon as its stage is free.

        Args:
          nth0: blocks that went through the stages before.
          latent: bf16[stages, HALVES, TOKENS, half], swizzled, in shared memory.
          rope: bf16[stages, TOKENS, rotary], likewise.
          here, done: barriers of the stages: this arrives at one and waits for the other.
        """
        stages = latent.shape[0]
        parts = self.value_width // GROUP + 1
        pieces = [(part, first) for part in range(parts) for first in range(0, TOKENS, PIECE)]

        def block(i: jax.Array, carry: Any) -> Any:
            places, found = carry
            nth = nth0 + i - begin
            slot = lax.rem(nth, stages)
            pl.when(i + BLOCKS_AHEAD < end)(lambda: self._to_l2(self._places(i + BLOCKS_AHEAD)))
            following = self._places(jnp.minimum(i + 1, end - 1))

            @pl.when(nth >= stages)
            def _() -> None:
                plgpu.barrier_wait(done.at[slot])

            for n, piece in enumerate(pieces):
                later = n + PIECES_AHEAD
                found += (self._fetch(places if later < len(pieces) else following, *pieces[later % len(pieces)]),)
                self._put(found[0], *piece, latent.at[slot], rope.at[slot])
                found = found[1:]

            @pl.when(i * TOKENS + TOKENS > self.length)
            def _() -> None:
                plgpu.commit_smem()  # what other threads stored is read here
                for half in range(HALVES):
                    zero_rows(latent.at[slot, half], self.length - i * TOKENS, COLUMNS, self.interpreted)

            plgpu.commit_smem()
            plgpu.barrier_arrive(here.at[slot])
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

    def _fetch(self, places: tuple[jax.Array, ...], part: int, first: int) -> tuple[jax.Array, ...]:
        """A piece on its way to registers: a group's values and scales, or the rotary columns."""
        found, groups = [], self.value_width // GROUP
        for _, page, slots in self._runs(places, first, PIECE):
            if part < groups:
                found.append(load(self.pool.latent.at[page, slots, pl.ds(part * GROUP, GROUP)], LATENT))
                found.append(load(self.pool.scales.at[page, slots, self.value_width // 4 + part], LATENT.reduce(1)))
            else:
                columns = pl.ds((self.value_width + 4 * groups) // 2, self.rotary)
                found.append(load(self.pool.rotary.at[page, slots, columns], ROTARY))
        return tuple(found)

    def _put(self, found: tuple[jax.Array, ...], part: int, first: int, latent: Any, rope: Any) -> None:
        """What `_fetch` found into a stage: the product of value and scale is rounded once."""
        size = min(self.page_size, PIECE)
        for n in range(PIECE // size):
            tokens = pl.ds(first + n * size, size)
            if part < self.value_width // GROUP:
                values, scale = found[2 * n : 2 * n + 2]
                half, inside = divmod(part * GROUP, self.value_width // HALVES)
                scales = laid(over(scale, shape=values.shape), LATENT, self.interpreted)
                numbers = (values.astype(jnp.float32) * scales).astype(jnp.bfloat16)
                latent[half, tokens, pl.ds(inside, GROUP)] = numbers
            else:
                rope[tokens] = found[n]
