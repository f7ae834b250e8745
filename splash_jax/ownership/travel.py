"""How histories travel in a switch: along which axes, to whom, and how much at most."""

import math

from splash_jax.ownership.layout import Axis, History, Layout
from splash_jax.ownership.manifest import KVShape


def travel_axes(src: Layout, dst: Layout) -> tuple[str, ...]:
    """Axes along which a rank may lack history that lies elsewhere; along the others its own coordinate has all of it.

    That holds while homes keep their coordinates along every axis with owners before and after, and along every axis
    over which positions are dealt out before and after.
    """
    dealt_alike = src.position_axes == dst.position_axes

    def stays(before: Axis, after: Axis) -> bool:
        match before.placement.history:
            case History.ALL:
                return True
            case History.REQUEST:
                return after.placement.history is History.REQUEST
            case History.POSITION:
                return dealt_alike

    return tuple(a.name for a, b in zip(src.axes, dst.axes, strict=True) if a.size > 1 and not stays(a, b))


def gathers(src: Layout, dst: Layout) -> bool:
    """Whether all ranks along the axes of travel need the same: one all-gather then serves them."""
    names = travel_axes(src, dst)
    return bool(names) and all(a.placement.history is History.ALL for a in dst.axes if a.name in names)


def free_axes(src: Layout, dst: Layout) -> tuple[str, ...]:
    """Axes along which a switch may choose homes anew at no cost: owners appear there."""
    return tuple(name for name in dst.owner_axes if name not in src.owner_axes)


def most_grains(kv: KVShape, src: Layout, dst: Layout, src_pages: int, dst_pages: int, slots: int) -> int:
    """Grains that one rank sends another at most, however uneven lengths are, with `slots` requests evenly at home.

    A rank that holds one share of p of some histories, of n grains in all, bounds n by p times its room; so do both.
    Of every history it has, and the other lacks, one share of lcm(p_src, p_dst); shares are rounded up.
    """
    per_page = kv.page_size // kv.grain(src, dst)
    here, there = src_pages * per_page, dst_pages * per_page
    alike = src.position_axes == dst.position_axes
    p_src, p_dst = (1, 1) if alike else (src.position_shares, dst.position_shares)
    parts = math.lcm(p_src, p_dst)
    owners = math.prod(a.size for a in src.axes if a.name in src.owner_axes + dst.owner_axes)
    requests = min(slots, math.ceil(slots / src.size) * src.size // owners)
    total = min(p_src * here + requests * (p_src - 1), p_dst * there + requests * (p_dst - 1))
    return min(here, there, (total + requests * (parts - 1)) // parts)
