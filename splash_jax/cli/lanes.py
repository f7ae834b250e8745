"""The picture of a preflight: of every switch one layer's compute and the next layer's transfer, a lane per stream."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from splash_jax.cli.values import pyplot, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from splash_jax.preflight import Report
    from splash_jax.preflight.timeline import Bar
    from splash_jax.runtime import SwitchKey

# Paul Tol's "bright" colours: told apart by readers with any colour vision, and in print.
COLOURS = {
    "attention": "#4477AA", "mlp": "#66CCEE", "experts": "#66CCEE", "exchange": "#CCBB44", "transfer": "#EE6677",
}  # fmt: skip
LANES = {"compute": 1, "communication": 0}


def draw_lanes(report: "Report", path: Path) -> bool:
    """Draw every switch that transfers into a PNG, a row each, decode beside prefill. False: there is none."""
    plt = pyplot()

    from splash_jax.preflight.case import STEPS

    keys = _programs(report)
    rows = list(dict.fromkeys(route for route, _ in keys))
    if not rows:
        return False
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(
            len(rows), len(STEPS), figsize=(13, 1.15 * len(rows) + 1.6), squeeze=False, sharex="col"
        )
        for i, row in enumerate(rows):
            for j, step in enumerate(STEPS):
                _draw(axes[i][j], report, keys[row, step], step)
            axes[i][0].set_ylabel(row, rotation=0, ha="right", va="center", labelpad=62, fontsize=10)
        for j, step in enumerate(STEPS):
            axes[0][j].set_title(f"in a {step} step", fontsize=11)
            axes[-1][j].set_xlabel("ms")
        _legend(figure, report)
        case = report.case
        figure.suptitle(
            f"{case.name}, {case.layouts[0].size} x {case.hardware.name}, {case.batch} x {case.context:,} tokens: "
            "order from the compiled schedule, durations from published peaks",
            fontsize=11,
        )
        figure.tight_layout(rect=(0, 0.04, 1, 0.99))
        save_figure(figure, path, dpi=110)
        plt.close(figure)
    return True


def _programs(report: "Report") -> "dict[tuple[str, str], SwitchKey]":
    """(switch, step) -> its program beside the most frequent kind of layer, for switches that transfer."""
    from splash_jax.runtime import SwitchKey

    case = report.case
    kind = max(case.compiled_kinds, key=case.kinds.count)
    found = {}
    for key, facts in report.facts.items():
        if isinstance(key, SwitchKey) and key.kind == kind and facts.schedule.transfers:
            step = next(s for s, bucket in case.buckets[key.route.dst].items() if bucket == key.bucket)
            found[f"{key.route.src} to {key.route.dst}", step] = key
    return found


def _draw(axes: "Axes", report: "Report", key: "SwitchKey", step: str) -> None:
    from splash_jax.preflight.timeline import timeline

    bars: list[Bar] = timeline(report.case, key, step, report.facts[key].schedule)
    for bar in bars:
        axes.barh(
            LANES[bar.lane], 1e3 * (bar.end - bar.start), left=1e3 * bar.start, height=0.8, color=COLOURS[bar.what],
            edgecolor="white", linewidth=0.3,
        )  # fmt: skip
    axes.set_yticks(list(LANES.values()), list(LANES), fontsize=8)
    axes.set_ylim(-0.6, 1.6)
    axes.margins(x=0.01)


def _legend(figure: Any, report: "Report") -> None:
    from matplotlib.patches import Patch

    experts = "experts" if "moe" in report.case.kinds else "mlp"
    names = {
        "attention": "attention", experts: experts, "exchange": "the layer's own exchange",
        "transfer": "the next layer's transfer",
    }  # fmt: skip
    handles = [Patch(color=COLOURS[key], label=label) for key, label in names.items()]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False)
