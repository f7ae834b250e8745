"""Page accounting: every page of a rank is free or held once, whatever happens to requests."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash_jax.errors import PoolCorrupt, RequestError
from splash_jax.kv import PagePool, TwinPool, filled_pool
from splash_jax.layouts import ROLES, make_layout
from splash_jax.ownership import KVShape, StateBytes, plan_switch

PAGES = 12
MESHES = [{"rank": 1}, {"rank": 3}, {"rank": 4}, {"node": 2, "chip": 2}]
STATE = StateBytes(projections=8, common=0, kv_per_token=1, num_layers=1)


def make_pool(role: str = "cp", ranks: int = 4, interleave: int = 4, pages: int = PAGES) -> PagePool:
    kv = KVShape(page_size=4, interleave=interleave, bytes_per_token=1)
    return PagePool(make_layout(role, {"rank": ranks}), kv, pages)


@st.composite
def pools(draw):
    mesh = draw(st.sampled_from(MESHES))
    layout = make_layout({axis: draw(st.sampled_from(sorted(ROLES))) for axis in mesh}, mesh)
    kv = KVShape(page_size=4, interleave=draw(st.sampled_from([1, 2, 4])), bytes_per_token=1)
    return PagePool(layout, kv, PAGES)


def total_held(pool: PagePool) -> list[int]:
    return pool.manifest().pages_used()


@given(pools(), st.data())
def test_pages_add_up_through_any_life(pool, data):
    """Adding, growing, shrinking asks, releasing: after each the pool checks and its counts are the manifest's."""
    live: dict[str, int] = {}
    for step in range(data.draw(st.integers(1, 20))):
        action = data.draw(st.sampled_from(["add", "grow", "release"]))
        if action == "add":
            name = f"r{step}"
            pool.add(name, data.draw(st.integers(0, pool.layout.size - 1)))
            live[name] = 0
        elif live:
            name = data.draw(st.sampled_from(sorted(live)))
            if action == "release":
                pool.release(name)
                del live[name]
            else:
                tokens = data.draw(st.integers(0, 60))
                lacking, free = pool.shortfall(name, tokens), pool.free_pages()
                if lacking:
                    with pytest.raises(PoolCorrupt, match=f"request '{name}' cannot grow to {tokens} tokens"):
                        pool.grow(name, tokens)
                    assert pool.free_pages() == free and pool.num_tokens(name) == live[name]
                else:
                    pool.grow(name, tokens)
                    live[name] = max(live[name], tokens)
        pool.check(live)
        assert [PAGES - n for n in pool.free_pages()] == total_held(pool)
        for name, tokens in live.items():
            assert name in pool and pool.num_tokens(name) == tokens
            for rank, more in pool.growth(name, tokens):
                lag = pool.layout.lag(pool.home(name), rank)
                assert more == 0 and len(pool.pages(name, rank)) == pool.kv.pages_held(pool.layout, lag, tokens)
    for name in live:
        pool.release(name)
    pool.check(live=())
    assert pool.free_pages() == [PAGES] * pool.layout.size


@given(pools(), pools(), st.data())
def test_many_grow_at_once_or_none_does(src, dst, data):
    """As one by one, where there are pages for all; and nothing changes where there are not, in either pool of two."""
    pools = [src] if src.layout.size != dst.layout.size or data.draw(st.booleans()) else [src, dst]
    pool = src if len(pools) == 1 else TwinPool(src, dst)
    for name in "abc"[: data.draw(st.integers(1, 3))]:
        for one in pools:
            one.add(name, data.draw(st.integers(0, src.layout.size - 1)))
        if pool.shortfall(name, tokens := data.draw(st.integers(0, 12))) == 0:
            pool.grow(name, tokens)
    names = list(src.manifest().requests)
    assert pool.requests_held() == [
        sum(rank in one.holders(name) for name in names) for one in pools for rank in range(one.layout.size)
    ]
    before = [one.manifest() for one in pools]
    wanted = {name: src.num_tokens(name) + data.draw(st.integers(0, 24)) for name in names}
    alone = [PagePool.adopt(manifest) for manifest in before]
    fits = True
    for name, tokens in wanted.items():
        fits = fits and all(one.shortfall(name, tokens) == 0 for one in alone)
        if fits:
            for one in alone:
                one.grow(name, tokens)
    assert pool.has_all(wanted) is fits and pool.grow_all(wanted) is fits
    assert [one.manifest() for one in pools] == ([one.manifest() for one in alone] if fits else before)
    for one in pools:
        one.check(live=names)


@given(pools(), st.data())
def test_a_manifest_is_adopted_whole(pool, data):
    for name in data.draw(st.sets(st.sampled_from("abcdef"))):
        pool.add(name, data.draw(st.integers(0, pool.layout.size - 1)))
        tokens = data.draw(st.integers(0, 12))
        if not pool.shortfall(name, tokens):
            pool.grow(name, tokens)
    manifest = pool.manifest()
    adopted = PagePool.adopt(manifest)
    assert adopted.manifest() == manifest and adopted.free_pages() == pool.free_pages()
    for name in manifest.requests:
        if not adopted.shortfall(name, 20):
            adopted.grow(name, 20)
        adopted.release(name)
    adopted.check(live=())
    assert pool.manifest() == manifest  # a copy: what happens to the new pool leaves the old one alone


@pytest.mark.parametrize("dst", ROLES)
def test_the_pool_after_a_switch_goes_on(dst):
    """Decoding continues on the adopted pool: the next token's page is taken where the new layout wants it."""
    pool = make_pool("cp", interleave=1)
    pool.add("a", 1)
    pool.grow("a", 16)
    plan = plan_switch(pool.manifest(), make_layout(dst, {"rank": 4}), pages_per_rank=PAGES, state=STATE)
    after = PagePool.adopt(plan.after)
    before = {rank: list(after.pages("a", rank)) for rank in after.holders("a")}
    grown = {rank for rank, need in after.growth("a", 17) if need > 0}
    assert grown == ({0, 1, 2, 3} if dst in ("tp", "rep") else {1})
    after.grow("a", 17)
    after.check(live=["a"])
    for rank, pages in before.items():
        assert after.pages("a", rank)[: len(pages)] == pages


def test_a_request_holds_pages_only_where_its_layout_says():
    pool = make_pool("dp")
    pool.add("a", 2)
    pool.grow("a", 5)
    assert pool.holders("a") == [2] and pool.pages("a", 0) == [] and len(pool.pages("a", 2)) == 2
    assert pool.free_pages() == [PAGES, PAGES, PAGES - 2, PAGES]
    assert "a" in pool and "b" not in pool


def test_growth_is_asked_before_it_is_taken():
    pool = make_pool("dp", pages=3)
    pool.add("a", 0)
    pool.add("b", 0)
    pool.grow("a", 8)
    assert pool.shortfall("b", 4) == 0 and pool.shortfall("b", 9) == 2
    assert pool.growth("a", 4) == [(0, -1)]
    pool.grow("a", 4)  # never shrinks
    assert pool.num_tokens("a") == 8 and len(pool.pages("a", 0)) == 2


def test_growth_at_once_never_shrinks():
    pool = make_pool("dp", pages=3)
    pool.add("a", 0)
    pool.grow("a", 8)
    assert pool.grow_all({"a": 3}) and pool.num_tokens("a") == 8


def test_a_home_that_is_no_rank_is_found():
    pool = make_pool("dp")
    pool.add("a", 0)
    manifest = pool.manifest()
    for home in (-1, 4):
        stray = replace(manifest, requests={"a": replace(manifest.requests["a"], home=home)})
        with pytest.raises(PoolCorrupt, match=f"request 'a' is at home on rank {home} of 4"):
            PagePool.adopt(stray)


def test_a_name_is_used_once():
    pool = make_pool()
    pool.add("a", 0)
    with pytest.raises(PoolCorrupt, match="request 'a' is already in the pool"):
        pool.add("a", 1)
    pool.release("a")
    pool.add("a", 1)
    assert pool.home("a") == 1


def leak(pool: PagePool) -> None:
    pool._free[2].pop()


def free_twice(pool: PagePool) -> None:
    pool._free[2].append(pool._free[2][0])


def free_what_is_held(pool: PagePool) -> None:
    pool._free[2].append(pool.pages("a", 2)[0])


def share(pool: PagePool) -> None:
    pool._pages["b"][2][0] = pool.pages("a", 2)[0]


def beyond(pool: PagePool) -> None:
    pool._free[2][0] = PAGES


# Damage that accounting could suffer. The check is fit for use only while it finds them all.
@pytest.mark.parametrize("damage", [leak, free_twice, free_what_is_held, share, beyond])
def test_planted_corruption_is_found(damage):
    pool = make_pool("tp")
    for name in ("a", "b"):
        pool.add(name, 0)
        pool.grow(name, 4)
    pool.check(live=["a", "b"])
    damage(pool)
    with pytest.raises(PoolCorrupt, match=rf"rank 2: \d+ free \+ \d+ held pages are not the {PAGES} of the pool"):
        pool.check()


def test_pages_of_requests_that_are_gone_are_found():
    pool = make_pool()
    for name in ("a", "b"):
        pool.add(name, 0)
    with pytest.raises(PoolCorrupt, match=r"pages are held for requests that are gone: \['b'\]"):
        pool.check(live=["a"])
    pool.check()


def test_a_manifest_that_shares_a_page_is_not_adopted():
    pool = make_pool("tp")
    for name in ("a", "b"):
        pool.add(name, 0)
        pool.grow(name, 4)
    share(pool)
    with pytest.raises(PoolCorrupt, match="rank 2"):
        PagePool.adopt(pool.manifest())


def test_requests_of_given_lengths_are_dealt_round_robin():
    kv, layout = KVShape(page_size=4, interleave=4, bytes_per_token=1), make_layout("dp", {"rank": 2})
    held = filled_pool(layout, kv, PAGES, [5, 1, 8]).manifest()
    assert [(r.home, r.num_tokens) for r in held.requests.values()] == [(0, 5), (1, 1), (0, 8)]
    with pytest.raises(RequestError, match=r"12 pages of 4 tokens per rank: request 2 of 3, of 48 tokens, lacks 2"):
        filled_pool(layout, kv, PAGES, [5, 1, 48])
