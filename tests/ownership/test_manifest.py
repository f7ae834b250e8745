"""Who holds position p (scenario S09): the cut of a history is a bijection, for every interleave."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash_jax.kv import PagePool
from splash_jax.layouts import ROLES, make_layout
from splash_jax.ownership import KVShape
from splash_jax.ownership.manifest import owner_pages_needed

MESHES = [{"rank": n} for n in range(1, 9)] + [{"node": 2, "chip": 2}, {"node": 2, "chip": 4}]
LAYOUTS = [
    make_layout(dict(zip(mesh, roles, strict=True)), mesh)
    for mesh in MESHES
    for roles in itertools.product(ROLES, repeat=len(mesh))
]
PAGE = 4
SHAPES = [KVShape(page_size=PAGE, interleave=i, bytes_per_token=10) for i in (1, 2, PAGE)]
LENGTHS = st.integers(0, 100)


@given(st.sampled_from(LAYOUTS), st.sampled_from(SHAPES), LENGTHS)
def test_positions_are_dealt_out_once_each(layout, kv, num_tokens):
    dealt = []
    for lag in range(layout.position_shares):
        local = np.arange(kv.tokens_held(layout, lag, num_tokens))
        positions = kv.positions(layout, lag, local)
        np.testing.assert_array_equal(kv.local_index(layout, positions), local)
        assert (kv.lag_of(layout, positions) == lag).all()
        assert (np.diff(positions) > 0).all()
        dealt.append(positions)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(num_tokens))


@given(st.sampled_from(LAYOUTS), st.sampled_from(SHAPES), LENGTHS)
def test_a_new_token_takes_the_next_position(layout, kv, num_tokens):
    """Growing by one token changes one share, by one token, whose position is the old length."""
    held = [
        (kv.tokens_held(layout, lag, num_tokens), kv.tokens_held(layout, lag, num_tokens + 1))
        for lag in range(layout.position_shares)
    ]
    grown = [lag for lag, (before, after) in enumerate(held) if after != before]
    assert grown == [int(kv.lag_of(layout, np.asarray(num_tokens)))]
    before, after = held[grown[0]]
    assert after == before + 1
    assert int(kv.positions(layout, grown[0], np.asarray(before))) == num_tokens


@given(st.sampled_from(LAYOUTS), st.sampled_from(SHAPES), LENGTHS)
def test_shares_are_even_and_pages_cover_them(layout, kv, num_tokens):
    held = [kv.tokens_held(layout, lag, num_tokens) for lag in range(layout.position_shares)]
    assert max(held) - min(held) <= kv.interleave
    assert held == sorted(held, reverse=True)  # the home is served first, so lag 0 bounds a block table's width
    for lag, tokens in enumerate(held):
        pages = kv.pages_held(layout, lag, num_tokens)
        assert (pages - 1) * PAGE < tokens <= pages * PAGE or tokens == pages == 0


@pytest.mark.parametrize(
    ("interleave", "expected"),
    [
        (1, [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]),
        (2, [[0, 1, 8, 9], [2, 3], [4, 5], [6, 7]]),
        (4, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]),
    ],
)
def test_ten_tokens_on_four_ranks(interleave, expected):
    kv, cp = KVShape(page_size=4, interleave=interleave, bytes_per_token=10), make_layout("cp", {"rank": 4})
    got = [kv.positions(cp, lag, np.arange(kv.tokens_held(cp, lag, 10))).tolist() for lag in range(4)]
    assert got == expected


@given(st.sampled_from(LAYOUTS), st.sampled_from(SHAPES), st.data())
def test_pages_needed_are_the_pages_a_pool_takes(layout, kv, data):
    requests = data.draw(
        st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(0, layout.size - 1), st.integers(0, 40)))
    )
    pool = PagePool(layout, kv, 100)
    for name, (home, tokens) in requests.items():
        pool.add(name, home)
        pool.grow(name, tokens)
    need = owner_pages_needed(kv, layout, requests)
    manifest = pool.manifest()
    assert manifest.pages_used() == need == [100 - free for free in pool.free_pages()]
    for name, (home, tokens) in requests.items():
        stored = manifest.requests[name]
        assert (stored.home, stored.num_tokens) == (home, tokens)
        assert tuple(stored.pages) == layout.holders(home)
