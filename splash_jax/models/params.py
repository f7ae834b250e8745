"""Weights as the engine holds them, described before any of them is read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from splash_jax.models.checkpoint import Checkpoint

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One weight: its global shape, how each dimension may be placed, and where its numbers come from.

    `dims` names every dimension: "heads" follows the attention layout, "ranks" is always cut over all ranks, None is
    never cut. `shape` may be padded with zeros at the end of a "ranks" dimension so that it divides. `read` returns
    the block at `index` (one slice with explicit bounds per dimension).
    """

    shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    sources: Mapping[str, tuple[int, ...]]
    read: Callable[[Checkpoint, Index], np.ndarray]
    dtype: str | None = None  # None: the type the model is served in

    @property
    def moves(self) -> bool:
        """Whether a switch of layout can move this weight."""
        return "heads" in self.dims


def in_blocks(leaf: Leaf, order: Sequence[int]) -> Leaf:
    """The same weight with its "heads" dimension, cut into len(order) equal blocks, in this order of blocks."""
    if not leaf.moves or list(order) == sorted(order):
        return leaf
    dim = leaf.dims.index("heads")
    width = leaf.shape[dim] // len(order)

    def read(ckpt: Checkpoint, index: Index) -> np.ndarray:
        wanted = order[index[dim].start // width : index[dim].stop // width]
        parts = [(*index[:dim], slice(b * width, (b + 1) * width), *index[dim + 1 :]) for b in wanted]
        return np.concatenate([leaf.read(ckpt, part) for part in parts], dim)

    return replace(leaf, read=read)


def padded(size: int, ranks: int) -> int:
    """`size` rounded up to a multiple of `ranks`."""
    return -(-size // ranks) * ranks


def fill(shape: tuple[int, ...], block: np.ndarray) -> np.ndarray:
    """`block` with zeros after it in every dimension up to `shape`."""
    if block.shape == shape:
        return block
    return np.pad(block, [(0, want - have) for want, have in zip(shape, block.shape, strict=True)])


def clip(index: slice, size: int) -> slice:
    """The part of `index` that exists in a dimension of `size`."""
    return slice(min(index.start, size), min(index.stop, size))


def extent(index: Index) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in index)


def vector(name: str, size: int, dtype: str | None = None) -> Leaf:
    """A tensor [size] as the file has it."""
    return Leaf(
        shape=(size,),
        dims=(None,),
        sources={name: (size,)},
        read=lambda ckpt, index: ckpt.read(name, index),
        dtype=dtype,
    )


def linear(
    name: str,
    size_out: int,
    size_in: int,
    dims: tuple[str | None, str | None] = (None, None),
    ranks: int = 1,
    dtype: str | None = None,
) -> Leaf:
    """A projection [out, in], as the file has it; a "ranks" dimension is padded."""
    sizes = (size_out, size_in)
    shape = tuple(padded(n, ranks) if d == "ranks" else n for n, d in zip(sizes, dims, strict=True))

    def read(ckpt: Checkpoint, index: Index) -> np.ndarray:
        return fill(extent(index), ckpt.read(name, (clip(index[0], size_out), clip(index[1], size_in))))

    return Leaf(shape=shape, dims=dims, sources={name: sizes}, read=read, dtype=dtype)
