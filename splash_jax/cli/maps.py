"""The picture of `splash plan --hardware`: regimes, step times with capacity limits, and what switches add."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from splash_jax.cli.plots import LINES
from splash_jax.cli.regimes import ROWS, SWITCHED, Outlook, tokens
from splash_jax.cli.values import pyplot, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from splash_jax.cost.regimes import RegimeMap
    from splash_jax.ownership import Layout


def draw_outlook(found: Outlook, path: Path) -> None:
    """Draw four panels into a PNG of 1680 x 1260 pixels."""
    plt = pyplot()

    with plt.rc_context({"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(2, 2, figsize=(14, 10.5))
        for one, rows in zip(axes[0], ROWS, strict=True):
            _regimes(one, found.maps[rows], "decode" if rows == 1 else f"chunks of {rows} prompt tokens each")
        _times(axes[1, 0], found)
        _switches(axes[1, 1], found)
        figure.suptitle(
            f"{found.model} ({found.dtype}) on {found.steps.ranks} x {found.hardware}: predicted, not measured",
            fontsize=14,
        )
        figure.tight_layout(rect=(0, 0, 1, 0.985))
        save_figure(figure, path, dpi=120)
        plt.close(figure)


def _regimes(axes: "Axes", made: "RegimeMap", what: str) -> None:
    from matplotlib.colors import ListedColormap, to_rgba
    from matplotlib.patches import Patch

    names = [str(one) for one in made.layouts]
    shades = ListedColormap([to_rgba("#FFFFFF"), *(to_rgba(LINES.get(name, "#999999"), 0.55) for name in names)])
    fastest = made.fastest
    axes.pcolormesh(fastest + 1, cmap=shades, vmin=0, vmax=len(names), edgecolors="white", linewidth=0.6)
    rooms: dict[tuple[int, ...], list[int]] = {}  # layouts that hold the same have one line
    for k in range(len(names)):
        rooms.setdefault(tuple(made.fits[..., k].sum(0).tolist()), []).append(k)
    lines = []
    for n, (last, which) in enumerate(sorted(rooms.items())):
        lines += axes.step(
            np.arange(len(last) + 1), [*last, last[-1]], where="post", linewidth=2,
            color=LINES.get(names[which[0]], "#222222"),
            linestyle=("-", "--", ":", "-.")[n % 4], label=f"room of {', '.join(names[k] for k in which)}",
        )  # fmt: skip
    lead = made.lead
    for i, j in np.argwhere(fastest >= 0):
        told = "" if not np.isfinite(lead[i, j]) else f"{100 * lead[i, j]:.0f}"
        axes.text(j + 0.5, i + 0.5, told, ha="center", va="center", fontsize=7.5, color="#222222")
    axes.set_xticks(np.arange(len(made.batches)) + 0.5, [str(n) for n in made.batches])
    axes.set_yticks(np.arange(len(made.contexts)) + 0.5, [tokens(n) for n in made.contexts.tolist()])
    axes.set_xlabel("requests")
    axes.set_ylabel("context of each")
    title = f"Fastest layout that fits: {what}\n(number: % that the second takes longer; lines: what each holds)"
    axes.set_title(title, loc="left", fontsize=11)
    used = [k for k in range(len(names)) if (fastest == k).any()]
    patches = [Patch(color=to_rgba(LINES.get(names[k], "#999999"), 0.55), label=names[k]) for k in used]
    axes.legend(handles=[*patches, *lines], fontsize=9, loc="upper right", handlelength=4)


def _times(axes: "Axes", found: Outlook) -> None:
    """Seconds of a decode step over context, at the outlook's batch; crosses where memory is full."""
    from splash_jax.cost import Load

    contexts = np.unique(np.geomspace(1024, 1e7, 60).astype(int))
    curves = {one: [] for one in found.steps.layouts}
    for context in contexts.tolist():
        for layout, estimate in found.steps.seconds(Load.balanced(found.batch, context, found.steps.ranks)).items():
            curves[layout].append(1e3 * estimate.seconds)
    for i, (layout, curve) in enumerate(curves.items()):
        name, held = str(layout), found.capacities.get(layout)
        limit = 0 if held is None else held.longest(found.batch, layout)
        style: dict[str, Any] = {"color": LINES.get(name, "#999999"), "linewidth": 2}
        inside = contexts <= limit
        axes.plot(contexts[inside], np.array(curve)[inside], label=name, linestyle="--" if i % 2 else "-", **style)
        axes.plot(contexts[~inside], np.array(curve)[~inside], color=style["color"], linewidth=0.8, linestyle=":")
        if limit:
            at = float(np.interp(np.log(limit), np.log(contexts), curve))
            axes.plot([limit], [at], marker="x", markersize=10, markeredgewidth=2.5, color=style["color"])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: tokens(round(x)))
    axes.set_xlabel("context of each request")
    axes.set_ylabel("milliseconds of a decode step")
    axes.grid(alpha=0.25)
    axes.set_title(f"{found.batch} requests; x: memory is full, dotted: beyond it", loc="left", fontsize=11)
    axes.legend(fontsize=9, handlelength=4)


def _switches(axes: "Axes", found: Outlook) -> None:
    """A direction of each kind of move, by colour; how it is done, by the dashes of its line."""
    from matplotlib.lines import Line2D

    ways: tuple[tuple[Literal["-", "--", ":"], str], ...] = (
        ("-", "in one decode step"), ("--", f"in one step with {ROWS[1]} prompt rows of each request"),
        (":", "spread over decode steps, all together"),
    )  # fmt: skip
    styles = [Line2D([], [], color="#222222", linestyle=style, linewidth=2, label=how) for style, how in ways]
    moves = []
    for i, ((src, dst), what) in enumerate(_kinds(found).items()):
        hue = ("#0077BB", "#CC3377", "#117733", "#CC8800")[i % 4]
        moves.append(Line2D([], [], color=hue, marker="o", linewidth=2, label=f"{src} -> {dst}: {what}"))
        spread = [q.spread.exposed_total for q in found.costs[src, dst]]
        alone, beside = ([q.exposed for q in costs[src, dst]] for costs in (found.costs, found.costs_beside_prompts))
        for values, (style, _) in zip((alone, beside, spread), ways, strict=True):
            axes.plot(SWITCHED, 1e3 * np.array(values), style, color=hue, marker="o", markersize=4, linewidth=2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=0.1)
    most = 1e3 * max(q.exposed for quotes in found.costs.values() for q in quotes)
    axes.set_ylim(-0.015, max(most, 1) * 1e3)  # room for the legend; what adds nothing is a line at 0
    axes.set_xticks(SWITCHED, [tokens(n) for n in SWITCHED])
    axes.minorticks_off()
    axes.set_xlabel("context of each request")
    axes.set_ylabel("milliseconds that a switch adds")
    axes.grid(alpha=0.25)
    axes.set_title(f"What a switch adds, {found.batch} requests, by what it moves and how", loc="left", fontsize=11)
    axes.legend(handles=[*moves, *styles], fontsize=9, loc="upper left", handlelength=4)


def _kinds(found: Outlook) -> "dict[tuple[Layout, Layout], str]":
    """The first direction that moves weights only, that gathers or exchanges histories only, and that does both."""
    kinds: dict[str, tuple[Layout, Layout]] = {}
    for (src, dst), quotes in found.costs.items():
        weights, kv = quotes[-1].weight_bytes > 0, quotes[-1].kv_bytes > 0
        gathers = dst.everywhere
        name = {(True, False): "weights", (True, True): "weights and KV"}.get(
            (weights, kv), "" if not kv else "KV to all ranks" if gathers else "KV exchanged"
        )
        if name and not (gathers and weights and kv):
            kinds.setdefault(name, (src, dst))
    return {pair: name for name, pair in kinds.items()}
