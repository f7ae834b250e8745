"""The picture of a simulation: how long every way took, and when the last one ran in which layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from splash_jax.cli.plots import LINES
from splash_jax.cli.values import pyplot, save_figure

if TYPE_CHECKING:
    from splash_jax.simulate import Deployment, Outcome, Row

TOKENS = "#882255"


def draw(
    deployment: "Deployment", rows: "list[Row]", outcomes: "Mapping[str, Outcome]", path: Path, title: str
) -> None:  # fmt: skip
    """Draw a PNG of 1440 x 960 pixels: bars of every way above, the last way's load and layouts below."""
    plt = pyplot()
    from matplotlib.patches import Patch

    names = [str(one) for one in deployment.layouts]
    last = list(outcomes)[-1]
    stretches = outcomes[last].stretches
    with plt.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (top, bottom) = plt.subplots(2, 1, figsize=(12, 8), height_ratios=(1, 1.3))
        ways = [row.way for row in rows][::-1]
        seconds = [row.seconds for row in rows][::-1]
        bars = top.barh(ways, seconds, color=[LINES.get(way, "#555555") for way in ways], height=0.7)
        top.bar_label(bars, [f"{value:,.1f} s" for value in seconds], padding=4)
        top.set_xlim(0, max(seconds) * 1.12)
        top.set_xlabel("seconds until everything is served")
        start = np.array([s.start for s in stretches])
        end = np.array([s.start + s.seconds for s in stretches])
        running = np.array([s.running for s in stretches])
        layout = np.array([s.layout for s in stretches])
        edges = np.flatnonzero(np.diff(layout)) + 1
        for first, past in zip([0, *edges], [*edges, len(layout)], strict=True):
            bottom.axvspan(
                start[first], end[past - 1], color=LINES.get(names[layout[first]], "#999999"), alpha=0.3, lw=0
            )
        (load,) = bottom.step(start, running, where="post", color="#222222", lw=1.3, label="running requests")
        bottom.set_xlim(0, end[-1])
        bottom.set_ylim(0, running.max() * 1.1)
        bottom.set_ylabel("running requests")
        bottom.set_xlabel("seconds")
        bottom.set_title(f"The run of {last}: the layout (colours) and the load", loc="left", fontsize=12)
        tokens = bottom.twinx()
        live = np.array([s.tokens for s in stretches]) / 1e6
        (held,) = tokens.step(start, live, where="post", color=TOKENS, lw=1.3, ls="--", label="live tokens (right)")
        tokens.set_ylabel("live tokens, millions", color=TOKENS)
        tokens.set_ylim(0)
        tokens.spines["right"].set_visible(True)
        shown = [name for i, name in enumerate(names) if (layout == i).any()]
        patches = [Patch(color=LINES.get(name, "#999999"), alpha=0.3, label=name) for name in shown]
        tokens.legend(handles=[*patches, load, held], loc="upper right", handlelength=3)
        figure.suptitle(title, fontsize=14)
        figure.tight_layout(rect=(0, 0, 1, 0.985))
        save_figure(figure, path, dpi=120)
        plt.close(figure)
