"""What was measured of switches, as a picture."""

from pathlib import Path
from typing import Any

import numpy as np
from switch_report import Row, moves

from splash_jax.cli.values import pyplot, save_figure

COLOURS = {"blocking": "#BB5566", "splash": "#004488"}


def draw(rows: list[Row], path: Path, device: str) -> None:
    """Overheads over target-ready: a dot for each median, a line from the first to the third quartile."""
    plt = pyplot()
    panels = list(dict.fromkeys((r.devices, r.processes, r.step) for r in rows))
    most = max(sum((r.devices, r.processes, r.step) == panel for r in rows) for panel in panels)
    with plt.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        columns = min(2, len(panels))
        lines = -(-len(panels) // columns)
        figure, grid = plt.subplots(
            lines, columns, figsize=(7.2 * columns, (0.42 * most + 1.5) * lines + 0.8), squeeze=False
        )
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid.flat, panels, strict=False):
            mine = [r for r in rows if (r.devices, r.processes, r.step) == panel]
            _panel(axes, mine, device)
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper right", ncols=3, frameon=False)
        figure.suptitle("What a switch adds to a step", x=0.01, ha="left", fontsize=15)
        figure.tight_layout(rect=(0, 0, 1, 0.97))
        save_figure(figure, path, dpi=120)
        plt.close(figure)


def _panel(axes: Any, rows: list[Row], device: str) -> None:
    first = rows[0]
    for offset, mode in ((-0.16, "blocking"), (0.16, "splash")):
        middle, low, high = (
            np.asarray([getattr(r, f"{mode}_over_p{p}") for r in rows]) for p in (50, 25, 75)
        )  # fmt: skip
        y = np.arange(len(rows)) + offset
        axes.hlines(y, low, high, color=COLOURS[mode], linewidth=2.5, alpha=0.45)
        axes.plot(middle, y, "o", color=COLOURS[mode], markersize=6, label=mode)
    least = np.asarray([(1 - r.possible) * r.blocking_over_p50 for r in rows])
    if np.isfinite(least).any():
        axes.plot(least, range(len(rows)), "|", color="#333333", markersize=16, label="least that these cores allow")
    axes.axvline(0, color="#333333", linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{r.src} → {r.dst}   ({moves(r)})" for r in rows])
    axes.invert_yaxis()
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel("ms over the target-ready step: median and quartiles")
    kind = "CPU devices" if device == "cpu" else device
    where = f"{first.devices} {kind}" + (f", {first.processes} processes" if first.processes > 1 else "")
    low, high = min(r.ready_p50 for r in rows), max(r.ready_p50 for r in rows)
    axes.set_title(f"{first.step}, {where} (ready: {low:.0f} to {high:.0f} ms)", loc="left", fontsize=12)
