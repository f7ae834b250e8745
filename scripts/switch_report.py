"""What was measured of switches: rows like the paper's Table 1, as a table and as CSV."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from splash_jax import files

MS = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One direction. Times in ms. An overhead is a run's time less the target-ready time of the same round."""

    devices: int
    processes: int
    cores: int  # 0: accelerators
    step: str
    src: str
    dst: str
    weights: str
    kv: str
    bytes: int
    runs: int
    ready_p50: float
    blocking_p50: float
    splash_p50: float
    blocking_over_p25: float
    blocking_over_p50: float
    blocking_over_p75: float
    blocking_over_p95: float
    splash_over_p25: float
    splash_over_p50: float
    splash_over_p75: float
    splash_over_p95: float
    reduction: float  # of the overhead's median, by splash; NaN where nothing is sent or blocking's is noise
    possible: float  # the largest reduction that the cores leave room for; NaN on accelerators, and as above
    cpu_ready: float
    cpu_blocking: float
    cpu_splash: float
    foreign: float  # mean core ms that other programs took from a ready run
    planning: float
    largest_difference: float


def summarise(found: dict[str, Any], devices: int, processes: int, pinned: bool) -> list[Row]:
    """A row for every direction and kind of step of one measurement."""
    cores = processes if pinned else found["cores"]
    return [
        _row(direction, found["timed"], devices, processes, cores if found["device"] == "cpu" else None)
        for direction in found["directions"]
    ]


def _row(direction: dict[str, Any], timed: list[dict[str, Any]], devices: int, processes: int, cores: Any) -> Row:
    mine = [t for t in timed if all(t[k] == direction[k] for k in ("step", "src", "dst"))]
    values = lambda mode, name: np.asarray([t[name] for t in mine if t["mode"] == mode]) * MS  # noqa: E731
    wall = {mode: values(mode, "wall") for mode in ("ready", "blocking", "splash")}
    cpu = {mode: float(np.median(values(mode, "cpu"))) for mode in wall}
    over = {mode: wall[mode] - wall["ready"] for mode in ("blocking", "splash")}
    spread: dict[str, Any] = {
        f"{mode}_over_p{p}": float(np.percentile(over[mode], p)) for mode in over for p in (25, 50, 75, 95)
    }  # fmt: skip
    blocking, splash = spread["blocking_over_p50"], spread["splash_over_p50"]
    clear = direction["bytes"] > 0 and blocking > 2 * _error(over["blocking"])
    foreign = float(np.mean(values("ready", "foreign")))
    # What blocking does, done by cores that never wait: whatever of the ready step's time other programs left.
    least = math.nan if cores is None else max(0.0, (cpu["blocking"] + foreign) / cores - float(np.mean(wall["ready"])))
    return Row(
        devices=devices,
        processes=processes,
        cores=cores or 0,
        runs=len(wall["ready"]),
        ready_p50=float(np.median(wall["ready"])),
        blocking_p50=float(np.median(wall["blocking"])),
        splash_p50=float(np.median(wall["splash"])),
        reduction=1 - splash / blocking if clear else math.nan,
        possible=1 - min(least, blocking) / blocking if clear else math.nan,
        cpu_ready=cpu["ready"],
        cpu_blocking=cpu["blocking"],
        cpu_splash=cpu["splash"],
        foreign=foreign,
        planning=float(np.median(values("splash", "planning"))),
        **direction,
        **spread,
    )


def _error(values: np.ndarray) -> float:
    """Standard error of a median, from the quartiles."""
    low, high = np.percentile(values, [25, 75])
    return float(1.25 * (high - low) / 1.35 / math.sqrt(len(values)))


def show(console: Console, rows: list[Row], device: str) -> None:
    """The rows of one measurement and one kind of step."""
    on_cpu, first = device == "cpu", rows[0]
    where = f"{first.devices} CPU devices" if on_cpu else f"{first.devices} x {device}"
    where += f" in {first.processes} processes" if first.processes > 1 else ""
    table = Table(
        title=f"{first.step} step, {where}: ms, medians of {first.runs} runs", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.title_justify = "left"
    names = [
        "direction",
        "moves",
        "MiB",
        "ready",
        "blocking",
        "splash",
        "+blocking",
        "p95",
        "+splash",
        "p95",
        "reduced",
    ]
    names += ["at most", "CPU ready", "blocking", "splash"] if on_cpu else []
    for name in names:
        table.add_column(name, justify="left" if name in ("direction", "moves") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row, on_cpu))
    table.add_section()
    table.add_row(*_total([row for row in rows if row.bytes], on_cpu))
    console.print(table)


def _cells(row: Row, on_cpu: bool) -> list[str]:
    number = lambda x: f"{x:.1f}"  # noqa: E731
    cells = [f"{row.src} -> {row.dst}", moves(row), number(row.bytes / 2**20)]
    cells += [number(x) for x in (row.ready_p50, row.blocking_p50, row.splash_p50)]
    cells += [f"{x:+.1f}" for x in (row.blocking_over_p50, row.blocking_over_p95)]
    cells += [f"{x:+.1f}" for x in (row.splash_over_p50, row.splash_over_p95)]
    cells.append(_percent(row.reduction))
    if on_cpu:
        cells += [_percent(row.possible), *map(number, (row.cpu_ready, row.cpu_blocking, row.cpu_splash))]
    return cells


def _total(rows: list[Row], on_cpu: bool) -> list[str]:
    """Sums of the medians over the directions that send something."""
    blocking, splash = (sum(getattr(r, f"{m}_over_p50") for r in rows) for m in ("blocking", "splash"))
    cells = [f"all {len(rows)} that send", "", f"{sum(r.bytes for r in rows) / 2**20:.1f}"]
    cells += [f"{sum(getattr(r, m) for r in rows):.1f}" for m in ("ready_p50", "blocking_p50", "splash_p50")]
    cells += [f"{blocking:+.1f}", "", f"{splash:+.1f}", ""]
    cells.append(_percent(1 - splash / blocking if blocking > 0 else math.nan))
    if on_cpu:
        room = sum((1 - r.possible) * r.blocking_over_p50 for r in rows if not math.isnan(r.possible))
        cells.append(_percent(1 - room / blocking if blocking > 0 else math.nan))
        cells += [f"{sum(getattr(r, m) for r in rows):.1f}" for m in ("cpu_ready", "cpu_blocking", "cpu_splash")]
    return cells


def moves(row: Row) -> str:
    """What is sent, in short."""
    sent = [name for name, primitive in (("weights", row.weights), ("KV", row.kv)) if primitive.startswith("all")]
    return " + ".join(sent) or "nothing"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"


def notes(rows: list[Row], device: str, pinned: bool) -> list[str]:
    """How to read the tables, and what the machine makes impossible."""
    worst = max((row.largest_difference for row in rows), key=lambda x: math.inf if math.isnan(x) else x)
    same = "tokens DIFFER" if math.isnan(worst) else f"tokens equal, log-probabilities within {worst:.1e}"
    found = [
        f"The three ways draw the same: {same}.",
        "ready: the step, its state moved before the clock. blocking: all state, waited for, then the step. splash: "
        "one step that does both.",
        "+: a run's time less ready's of the same round; p95 of these differences. MiB: received by the busiest rank.",
        "reduced: 1 - splash's overhead / blocking's; '-' where nothing is sent or blocking's is noise (2 errors).",
        f"Plans and maps are made before the clock: {min(r.planning for r in rows):.1f} to "
        f"{max(r.planning for r in rows):.1f} ms a switch, in all modes alike.",
    ]
    if device == "cpu":
        taken = sum(row.foreign for row in rows) / sum(row.ready_p50 * row.cores for row in rows)
        found += [
            "On CPU the cores that compute also copy the bytes, so moving is hidden only where a core would else wait. "
            "at most: the",
            "reduction if no core ever waited: 1 - ((CPU of blocking + other programs) / cores - ready) / +blocking.",
            f"Other programs took {max(taken, 0):.0%} of the cores while ready steps ran. CPU: of all threads"
            + (" and processes, each on its own core." if pinned else "."),
        ]
    return found


def write_csv(rows: list[Row], path: Path) -> None:
    told = ({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in asdict(row).items()} for row in rows)
    files.write_csv(path, Row.__slots__, told)
