"""What pictures say beside their lines: legends, titles, the same hue for a layout everywhere."""

from collections.abc import Callable
from dataclasses import replace

import matplotlib as mpl

mpl.use("Agg")

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from splash_jax.cli.maps import draw_outlook
from splash_jax.cli.plots import BANDS, LINES, draw_run
from splash_jax.cli.regimes import look_ahead
from splash_jax.cli.simulate_plot import draw
from splash_jax.cost import ServedModel, StepModel, load_hardware
from splash_jax.kv import filled_pool
from splash_jax.layouts import ROLES, make_layout
from splash_jax.ownership import KVShape, StateBytes, plan_switch
from splash_jax.preflight.case import read_model
from splash_jax.scheduler import ModelCosts
from splash_jax.simulate import Deployment, Traffic, buckets_of, compare
from splash_jax.simulate.compare import Way
from tests.cli.test_cli import record


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch):
    """Draws, and returns the figure as it was saved."""
    shut = plt.close

    def keep(draw: Callable[[], None]) -> Figure:
        monkeypatch.setattr(plt, "close", lambda figure: None)
        draw()
        return plt.gcf()

    yield keep
    shut("all")


def test_a_layout_has_one_hue_in_every_picture():
    assert set(LINES) == set(BANDS) == set(ROLES)
    for name in set(ROLES) - {"rep"}:  # which is grey
        line, band = (np.array(to_rgb(shades[name])) for shades in (LINES, BANDS))
        assert np.corrcoef(line, band)[0, 1] > 0.9, name


def test_a_run_tells_the_planned_bytes_of_a_switch(tmp_path, drawn):
    tp, dp = (make_layout(name, {"rank": 2}) for name in ("tp", "dp"))
    pool = filled_pool(tp, KVShape(page_size=4, interleave=4, bytes_per_token=10), 4, [6])
    state = StateBytes(projections=1 << 20, common=0, kv_per_token=10, num_layers=4)
    plan = plan_switch(pool.manifest(), dp, pages_per_rank=4, state=state)
    records = [record(0, "tp", (1, 0)), replace(record(1, "dp", (1, 0)), switch=plan)]
    figure = drawn(lambda: draw_run(records, tmp_path / "run.png", 2))
    assert "weights: all_gather\nKV: discard\nplanned: 2 MiB" in [text.get_text() for text in figure.axes[1].texts]


def test_every_line_of_what_switches_add_has_its_colour_and_its_dashes_in_the_legend(tmp_path, drawn):
    found = look_ahead(
        "glm-5.3", "b200", {"rank": 8}, tuple(ROLES), dtype="float8", batch=16, page_size=64, fraction=0.9, budget=None
    )
    axes = drawn(lambda: draw_outlook(found, tmp_path / "map.png")).axes[3]
    legend = axes.get_legend()
    assert legend is not None
    told = [one for one in legend.legend_handles if isinstance(one, Line2D)]
    assert len(axes.lines) == 12 and len(told) == 4 + 3
    assert {line.get_color() for line in axes.lines} == {one.get_color() for one in told[:4]}
    assert {line.get_linestyle() for line in axes.lines} == {one.get_linestyle() for one in told[4:]}
    assert not {one.get_color() for one in told[4:]} & {line.get_color() for line in axes.lines}
    assert legend.handlelength >= 4
    assert axes.get_ylim()[0] < 0  # so that a line at 0 is seen


def test_a_simulation_has_a_title_and_names_its_lines(tmp_path, drawn):
    layouts = tuple(make_layout(name, {"rank": 8}) for name in ("tp", "dp"))
    model = read_model("deepseek-v3.2")
    served = ServedModel.of(model, "float8")
    kv = KVShape(page_size=64, interleave=64, bytes_per_token=served.kv_bytes_per_token)
    deployment = Deployment(
        layouts=layouts, pages=dict.fromkeys(layouts, 1000), kv=kv, slots=8, every=8,
        state=StateBytes(projections=1 << 20, common=0, kv_per_token=kv.bytes_per_token, num_layers=4),
        buckets=buckets_of(layouts, 8, 512, 64), costs=ModelCosts(StepModel(served, layouts, load_hardware("b200"))),
    )  # fmt: skip
    load = Traffic(arrival=np.zeros(4), prompt=np.full(4, 100), output=np.full(4, 20), limit=np.full(4, 20))
    rows, outcomes = compare(deployment, load, [Way(name="tp", start="tp"), Way(name="dp", start="dp")])
    figure = drawn(lambda: draw(deployment, rows, outcomes, tmp_path / "run.png", "four requests"))
    top, _, tokens = figure.axes
    assert figure.get_suptitle() == "four requests"
    hues = {bar.get_facecolor()[:3] for bar in top.patches}
    assert {to_rgb(LINES["tp"]), to_rgb(LINES["dp"])} < hues
    legend = tokens.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["dp", "running requests", "live tokens (right)"]
