"""The picture of a run: which layout, which requests, and what memory holds, step by step."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from splash_jax.cli.values import in_bytes, pyplot, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from splash_jax.engine import StepRecord

# Paul Tol's "muted" colours: told apart by readers with any colour vision, and in print.
OWNERS = ("#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255")
SHARED = "#BBBBBB"
# The hues of layouts in every picture: pale behind a run, full where they are lines and bars.
BANDS = {
    "dp": "#FDF3DC", "dop": "#E3F1E6", "tp": "#E4ECF8", "cp": "#F8E6EC", "dcp": "#EFE3F3", "rep": "#E8E8E8",
}  # fmt: skip
LINES = {"tp": "#0077BB", "dp": "#CC8800", "cp": "#CC3377", "dop": "#117733", "dcp": "#774499", "rep": "#777777"}
PROJECTIONS, ALLOCATED, USED = "#DDAA33", "#BFD7EA", "#004488"
MIB = 2**20


def draw_run(records: "list[StepRecord]", path: Path, num_devices: int) -> None:
    """Draw a run's records into a PNG of 1440 x 1080 pixels."""
    plt = pyplot()

    with plt.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (top, bottom) = plt.subplots(2, 1, figsize=(12, 9), sharex=True, height_ratios=(1, 1))
        _requests(top, records, num_devices)
        _memory(bottom, records)
        for axes in (top, bottom):
            _bands(axes, records)
            axes.set_xlim(0, len(records))
        _names(top, records)
        _switches(bottom, records)
        bottom.set_xlabel("step")
        count = len({record.layout for record in records})
        words = ("one", "two", "three", "four", "five", "six")
        route = f"{words[count - 1]} attention layout{'s' if count > 1 else ''}"
        figure.suptitle(f"One batch drains through {route}; no request stops", fontsize=15, y=0.985)
        figure.tight_layout(rect=(0, 0, 1, 0.985))
        save_figure(figure, path, dpi=120)
        plt.close(figure)


def _edges(values: Any) -> np.ndarray:
    """Values of steps as a staircase: each holds until the next step, the last one too."""
    values = np.asarray(values, float)
    return np.concatenate([values, values[-1:]])


def _requests(axes: "Axes", records: "list[StepRecord]", num_devices: int) -> None:
    from matplotlib.ticker import MaxNLocator

    homes = np.array([r.running_by_home for r in records], float).T  # [ranks, steps]
    owned = np.array([_owned(r) for r in records])
    rows = [_edges(np.where(owned, row, 0)) for row in homes] + [_edges(np.where(owned, 0, homes.sum(0)))]
    labels = [f"rank {i}" for i in range(num_devices)] + ["no owner"]
    colours = [OWNERS[i % len(OWNERS)] for i in range(num_devices)] + [SHARED]
    axes.stackplot(
        np.arange(len(records) + 1), rows, labels=labels, colors=colours, step="post", edgecolor="white", linewidth=0.4
    )
    axes.set_ylim(0, homes.sum(0).max() * 1.3)
    axes.set_ylabel("running requests")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    title = "Requests by the rank that owns their history (grey: tp has it on every rank, cp deals it out by position)"
    axes.set_title(title, loc="left", fontsize=12)
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.87), ncols=3, fontsize=9, framealpha=0.9)


def _owned(record: "StepRecord") -> bool:
    """Whether the layout of a step gives every request an owner."""
    from splash_jax.layouts import ROLES
    from splash_jax.ownership import History

    roles = (part.split("=")[-1] for part in record.layout.split(","))
    return any(ROLES[role].placement.history is History.REQUEST for role in roles)


def _memory(axes: "Axes", records: "list[StepRecord]") -> None:
    x = np.arange(len(records) + 1)
    weights = _edges([r.projection_bytes / MIB for r in records])
    allocated = weights + _edges([r.kv_bytes / MIB for r in records])
    used = weights + _edges([r.kv_bytes / MIB * max(r.pages_used) / r.pages_per_rank for r in records])
    fill: dict[str, Any] = {"step": "post", "linewidth": 0}
    axes.fill_between(x, 0, weights, color=PROJECTIONS, label="attention projections", **fill)
    axes.fill_between(x, weights, allocated, color=ALLOCATED, label="KV pages allocated", **fill)
    axes.fill_between(x, weights, used, color=USED, label="of them in use (fullest rank)", **fill)
    whole = allocated + _edges([r.transit_bytes / MIB for r in records])
    free: dict[str, Any] = fill | {"facecolor": "#EEEEEE", "edgecolor": "#999999", "hatch": "///"}
    axes.fill_between(x, allocated, whole, label="kept free for a layer on the move", **free)
    axes.set_ylim(0, whole.max() * 1.45)
    axes.set_ylabel("MiB per rank")
    title = "Attention state of a rank: what one layout spends on projections, another has for KV"
    axes.set_title(title, loc="left", fontsize=12)
    axes.legend(loc="upper right", fontsize=9, framealpha=0.9, ncols=4)


def _phases(records: "list[StepRecord]") -> list[tuple[int, int, str]]:
    """(first step, step after the last, layout) of each stretch in one layout."""
    starts = [i for i, r in enumerate(records) if i == 0 or r.layout != records[i - 1].layout]
    return [(a, b, records[a].layout) for a, b in zip(starts, [*starts[1:], len(records)], strict=True)]


def _bands(axes: "Axes", records: "list[StepRecord]") -> None:
    for begin, end, layout in _phases(records):
        axes.axvspan(begin, end, color=BANDS.get(layout, "#EEEEEE"), zorder=-1, linewidth=0)
    for begin, _, _ in _phases(records)[1:]:
        axes.axvline(begin, color="#333333", linewidth=1, linestyle="--")


def _names(axes: "Axes", records: "list[StepRecord]") -> None:
    height = axes.get_ylim()[1]
    for begin, _, layout in _phases(records):
        axes.text(begin + 1, height * 0.97, layout, va="top", fontsize=15, fontweight="bold")


def _switches(axes: "Axes", records: "list[StepRecord]") -> None:
    """Beside each switch, what it did and the useful bytes that the busiest rank receives, by the plan."""
    height = axes.get_ylim()[1]
    for i, record in enumerate(records):
        if record.switch is not None:
            planned = in_bytes(max(record.switch.bytes_per_rank()))
            text = f"weights: {record.switch.weights.primitive}\nKV: {record.switch.kv.primitive}\nplanned: {planned}"
            axes.text(i + 1, height * 0.89, text, va="top", fontsize=9.5)
