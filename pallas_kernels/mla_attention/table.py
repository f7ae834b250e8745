"""Where keys lie: what every implementation of the op is handed. S sequences, W pages per sequence."""

from typing import NamedTuple

import jax


class PageTable(NamedTuple):
    """Where the keys of every sequence lie on this rank.

    Sequences come in two runs: `decode` of them with one query row each, then tiles of `tile` rows, each tile of one
    sequence. Local key `l` of a sequence stands at position `(l // interleave * shares + lag) * interleave +
    l % interleave` and lies in page `pages[l // page_size]`.
    """

    pages: jax.Array  # i32[S, W]
    held: jax.Array  # i32[S]: keys of the sequence on this rank
    lag: jax.Array  # i32[S]: 0 <= lag < shares
