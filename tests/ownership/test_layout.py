"""Layouts as values: groups, shares and holders of ranks, on one axis and on two."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash_jax.layouts import ROLES, make_layout
from splash_jax.ownership import History, Layout, Projections

MESHES = [{"rank": n} for n in range(1, 9)] + [{"node": 2, "chip": 2}, {"node": 2, "chip": 4}, {"node": 3, "chip": 2}]
LAYOUTS = [
    make_layout(dict(zip(mesh, roles, strict=True)), mesh)
    for mesh in MESHES
    for roles in itertools.product(ROLES, repeat=len(mesh))
]
EVERY_LAYOUT = st.sampled_from(LAYOUTS)


def one(role: str, size: int = 4) -> Layout:
    return make_layout(role, {"rank": size})


@pytest.mark.parametrize(
    ("role", "head_shards", "owner_groups", "position_shares", "everywhere"),
    [
        ("tp", 4, 1, 1, True),
        ("dp", 1, 4, 1, False),
        ("cp", 1, 1, 4, False),
        ("dop", 4, 4, 1, False),
        ("dcp", 4, 1, 4, False),
        ("rep", 1, 1, 1, True),
    ],
)
def test_the_layouts_of_one_axis(role, head_shards, owner_groups, position_shares, everywhere):
    layout = one(role)
    assert (layout.head_shards, layout.owner_groups, layout.position_shares) == (
        head_shards,
        owner_groups,
        position_shares,
    )
    assert layout.everywhere is everywhere
    assert str(layout) == role


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout}-{layout.size}")
def test_axes_divide_by_placement(layout):
    """Every axis splits heads or keeps them whole, and histories lie by exactly one rule on it."""
    by_history = {
        History.REQUEST: layout.owner_axes,
        History.POSITION: layout.position_axes,
        History.ALL: tuple(a.name for a in layout.axes if a.placement.history is History.ALL),
    }
    assert sorted(sum(by_history.values(), ())) == sorted(layout.axis_names)
    for axis in layout.axes:
        assert (axis.name in layout.head_axes) is (axis.placement.projections is Projections.SPLIT)
    copies = layout.size // (layout.owner_groups * layout.position_shares)
    assert copies * layout.owner_groups * layout.position_shares == layout.size


@given(EVERY_LAYOUT)
def test_ranks_fall_evenly_into_groups_and_shares(layout):
    seen: dict[tuple[int, int], int] = {}
    for rank in range(layout.size):
        key = layout.group_of(rank), layout.share_of(rank)
        seen[key] = seen.get(key, 0) + 1
    assert set(seen) == set(itertools.product(range(layout.owner_groups), range(layout.position_shares)))
    assert len(set(seen.values())) == 1


@given(EVERY_LAYOUT, st.data())
def test_holders_are_the_homes_group_and_lags_cover_every_share(layout, data):
    home = data.draw(st.integers(0, layout.size - 1))
    holders = layout.holders(home)
    assert home in holders and layout.lag(home, home) == 0
    assert holders == tuple(r for r in range(layout.size) if layout.group_of(r) == layout.group_of(home))
    lags = [layout.lag(home, rank) for rank in holders]
    assert sorted(set(lags)) == list(range(layout.position_shares))
    assert len(lags) % layout.position_shares == 0


def test_ranks_are_row_major_over_axes():
    layout = make_layout("node=dop,chip=cp", {"node": 2, "chip": 4})
    assert [layout.group_of(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [layout.share_of(r) for r in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert layout.holders(5) == (4, 5, 6, 7)
    assert [layout.lag(5, r) for r in layout.holders(5)] == [3, 0, 1, 2]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout}-{layout.size}")
def test_a_rank_holds_the_head_blocks_that_agree_with_it(layout):
    """A cut dimension gives part i of it to rank i of the axes that split heads, so the parts lie in that order."""
    blocks = np.asarray(layout.head_blocks()).reshape(layout.head_shards, -1)
    for rank in range(layout.size):
        mine = blocks[layout.index(rank, layout.head_axes)].tolist()
        agree = [
            b for b in range(layout.size) if layout.index(b, layout.head_axes) == layout.index(rank, layout.head_axes)
        ]
        assert mine == agree and rank in mine


def test_layouts_are_values():
    assert one("cp") == one("cp") and hash(one("cp")) == hash(one("cp"))
    assert one("cp") != one("dp") and one("cp") != one("cp", 8)
    assert {one("tp"): 1}[make_layout({"rank": "tp"}, {"rank": 4})] == 1
    assert str(make_layout("node=dop,chip=cp", {"node": 2, "chip": 4})) == "node=dop,chip=cp"
