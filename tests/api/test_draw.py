"""Pictures of holdings and plans, as text and as figures: what is filled is what the manifest says."""

import itertools

import numpy as np
import pytest
from matplotlib.collections import PatchCollection

from splash_jax.api.draw import draw_ownership, ownership_grid, ownership_text, plan_text
from splash_jax.errors import RequestError
from splash_jax.kv import PagePool
from splash_jax.layouts import ROLES, make_layout
from splash_jax.ownership import KVShape, Layout, Manifest, StateBytes, plan_switch

MESH = {"node": 2, "chip": 4}
PAIRS = [",".join(f"{axis}={role}" for axis, role in zip(MESH, pair, strict=True)) for pair in
         itertools.product(ROLES, repeat=2)]  # fmt: skip
PAGE, PAGES = 4, 20
STATE = StateBytes(projections=800, common=0, kv_per_token=10, num_layers=3)
REQUESTS = {"a": 13, "b": 5, "c": 1, "empty": 0}


def hold(layout: Layout, interleave: int = PAGE, requests: dict[str, int] = REQUESTS) -> Manifest:
    """Requests of so many tokens, dealt to homes 0, 1, ..."""
    pool = PagePool(layout, KVShape(page_size=PAGE, interleave=interleave, bytes_per_token=10), PAGES)
    for home, (name, tokens) in enumerate(requests.items()):
        pool.add(name, home)
        pool.grow(name, tokens)
    return pool.manifest()


def one(role: str, size: int = 4) -> Layout:
    return make_layout(role, {"rank": size})


@pytest.mark.parametrize("text", [*ROLES, *PAIRS])
def test_filled_cells_are_the_pages_of_the_manifest(text):
    layout = make_layout(text, MESH) if "=" in text else one(text)
    manifest = hold(layout)
    heads, *histories = ownership_grid(manifest)
    assert [block.name for block in histories] == list(REQUESTS)
    for block in histories:
        held = manifest.requests[block.name].pages
        assert block.held_RC.sum(1).tolist() == [len(held.get(rank, ())) for rank in range(layout.size)]
    assert (heads.held_RC.sum(1) == layout.size / layout.head_shards).all()
    assert (heads.held_RC.sum(0) == layout.size / layout.head_shards).all(), "every head group is held as often"


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("interleave", [1, 2])
def test_shares_of_pages_dealt_out_finer_add_up(role, interleave):
    layout = one(role)
    for block in ownership_grid(hold(layout, interleave))[1:]:
        copies = layout.size / (layout.owner_groups * layout.position_shares)
        np.testing.assert_allclose(block.held_RC.sum(0), copies)


def test_a_layout_alone_has_projections_only():
    assert ownership_text(one("dop", 3)) == "dop     heads\nrank 0  █··\nrank 1  ·█·\nrank 2  ··█"
    assert len(ownership_grid(one("cp"))) == 1


def test_the_text_of_a_small_case():
    text = [
        "cp      heads  a     b   c  empty  pages",
        "rank 0  ████   █···  ··  ·             1",
        "rank 1  ████   ·█··  █·  ·             2",
        "rank 2  ████   ··█·  ·█  █             3",
        "rank 3  ████   ···█  ··  ·             1",
    ]
    assert ownership_text(hold(one("cp"))) == "\n".join(text)
    finer = ownership_text(hold(one("cp"), interleave=2, requests={"a": 13}))
    assert finer.splitlines()[1:] == [
        "rank 0  ████   ▒·▒·      1",
        "rank 1  ████   ▒·▒·      1",
        "rank 2  ████   ·▒·█      1",
        "rank 3  ████   ·▒··      1",
    ]  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_a_figure_fills_as_many_cells(role):
    manifest = hold(one(role))
    figure = draw_ownership(manifest, manifest.layout, titles=["before", "after"])
    before, after = figure.axes
    assert [axes.get_title("left") for axes in figure.axes] == ["before", "after"]
    cells = {c.get_label(): len(c.get_paths()) for c in before.collections if isinstance(c, PatchCollection)}
    for name, request in manifest.requests.items():
        assert cells[name] == sum(map(len, request.pages.values()))
    assert cells["heads"] == 16 // manifest.layout.head_shards
    texts = [text.get_text() for text in before.texts]
    assert texts[-4:] == [str(pages) for pages in manifest.pages_used()]
    assert "pages" not in [text.get_text() for text in after.texts]
    figure.canvas.draw()


def test_more_figures_than_a_row_holds():
    figure = draw_ownership(*(one(role) for role in ("tp", "dp", "cp")), columns=2)
    assert [axes.get_title("left") for axes in figure.axes if axes.axison] == ["tp", "dp", "cp"]


def test_a_plan_says_what_goes_where():
    plan = plan_switch(hold(one("cp")), one("dp"), pages_per_rank=PAGES, state=STATE)
    assert plan_text(plan) == "\n".join(
        [
            "cp -> dp: 4 requests, 3 layers",
            "projections  keep",
            "history      all_to_all, 4 x 4 tokens of 40 bytes per layer",
            "             from rank (down) to rank (across), in 4 tokens:",
            "                  0  1  2  3",
            "               0  ·  ·  ·  ·",
            "               1  1  ·  ·  ·",
            "               2  1  1  ·  ·",
            "               3  1  ·  ·  ·",
            "received     360, 120, 0, 0 (bytes per rank, all layers)",
        ]
    )


def test_a_plan_without_moves_of_history():
    plan = plan_switch(hold(one("tp")), one("dp"), pages_per_rank=PAGES, state=STATE)
    text = plan_text(plan)
    assert "projections  all_gather, 600 bytes per layer to every rank\n" in text
    assert "history      discard, nothing leaves its rank\n" in text
    assert text.endswith("received     1,800 each (bytes per rank, all layers)")


def test_a_plan_that_repacks_says_so():
    now = hold(one("tp"), requests={"gone": 16, "a": 8})
    left = Manifest(layout=now.layout, kv=now.kv, pages_per_rank=PAGES, requests={"a": now.requests["a"]})
    text = plan_text(plan_switch(left, one("dop"), pages_per_rank=3, state=STATE))
    assert "             2 x 4 tokens change their page without leaving their rank\n" in text


def test_pictures_of_nothing():
    """No request is a picture of weights alone; of no holding there is none."""
    nobody = hold(make_layout("dp", {"rank": 1}), requests={})
    assert ownership_text(nobody).splitlines() == ["dp      heads  pages", "rank 0  █          0"]
    assert "0 requests" in plan_text(plan_switch(nobody, nobody.layout, pages_per_rank=PAGES, state=STATE))
    assert len(draw_ownership(nobody).axes) == 1
    with pytest.raises(RequestError, match="there is nothing to draw; give a layout or a manifest, or several"):
        draw_ownership()
