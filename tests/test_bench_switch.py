"""The benchmark of switches: its numbers from made-up times, its files, and (slow) a tiny run of the whole script."""

import csv
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import switch_report

    return switch_report


@pytest.fixture
def draw(report: Any) -> Any:
    import switch_plot

    return switch_plot.draw


def made_up(wall: dict[str, float], cpu: dict[str, float], device: str = "cpu") -> dict[str, Any]:
    """Ten rounds of one direction that sends and one that does not, slower from round to round."""
    names = {"tp": "cp", "dp": "dop"}
    timed = [
        {"step": "decode", "src": src, "dst": dst, "mode": mode, "round": turn, "planning": 0.001, "foreign": 0.0}
        | {"wall": (wall[mode] if src == "tp" else wall["ready"]) + turn * 1e-3, "cpu": cpu[mode]}
        for turn in range(10)
        for src, dst in names.items()
        for mode in wall
    ]
    directions = [
        {"step": "decode", "src": "tp", "dst": "cp", "weights": "all_gather", "kv": "discard", "bytes": 3 << 20},
        {"step": "decode", "src": "dp", "dst": "dop", "weights": "discard", "kv": "discard", "bytes": 0},
    ]
    return {
        "device": device,
        "cores": 2,
        "timed": timed,
        "directions": [d | {"largest_difference": 1e-6} for d in directions],
    }


WALL = {"ready": 0.100, "blocking": 0.140, "splash": 0.110}
CPU = {"ready": 0.150, "blocking": 0.220, "splash": 0.210}


def test_overheads_are_differences_within_a_round(report: Any) -> None:
    moving, still = report.summarise(made_up(WALL, CPU), 2, 1, False)
    assert moving.blocking_over_p50 == pytest.approx(40) and moving.splash_over_p95 == pytest.approx(10)
    assert moving.ready_p50 == pytest.approx(104.5)
    assert moving.reduction == pytest.approx(0.75)
    # 220 ms of work on two cores take 110 ms at least: 5.5 of the 40 cannot be hidden. Others' work comes on top.
    assert moving.possible == pytest.approx(1 - 5.5 / 40)
    crowded = made_up(WALL, CPU)
    for run in crowded["timed"]:
        run["foreign"] = 0.009
    assert report.summarise(crowded, 2, 1, False)[0].possible == pytest.approx(1 - 10 / 40)
    assert math.isnan(still.reduction) and still.blocking_over_p50 == 0
    pinned, _ = report.summarise(made_up(WALL, CPU), 2, 4, True)
    assert pinned.possible == 1  # of four cores there would be room
    elsewhere, _ = report.summarise(made_up(WALL, CPU, "NVIDIA H200"), 2, 1, False)
    assert math.isnan(elsewhere.possible)


def test_the_table_the_csv_and_the_picture(
    report: Any, draw: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = report.summarise(made_up(WALL, CPU), 2, 1, False)
    report.show(Console(width=150), rows, "cpu")
    told = capsys.readouterr().out
    assert "tp -> cp" in told and "75%" in told and "all 1 that send" in told
    assert "the cores that compute also copy" in " ".join(report.notes(rows, "cpu", False))
    assert "cores" not in " ".join(report.notes(rows, "NVIDIA H200", False))
    report.write_csv(rows, tmp_path / "switch.csv")
    with (tmp_path / "switch.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [(r["src"], r["dst"]) for r in read] == [("tp", "cp"), ("dp", "dop")]
    assert float(read[0]["reduction"]) == pytest.approx(0.75) and read[1]["reduction"] == "nan"
    draw(rows, tmp_path / "switch.png", "cpu")
    assert (tmp_path / "switch.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize("more", [[], ["--processes", "2"]], ids=["one process", "two processes"])
def test_a_tiny_run(tmp_path: Path, more: list[str]) -> None:
    files = ["--csv", str(tmp_path / "a.csv"), "--plot", str(tmp_path / "a.png")]
    model = write_checkpoint(tmp_path / "model", num_hidden_layers=2, first_k_dense_replace=2)
    size = ["--model", str(model), "--devices", "2", "--batch", "2", "--context", "64", "--runs", "3"]
    command = [sys.executable, "scripts/bench_switch.py", *size, "--layouts", "tp,cp", "--prefill", "8", *files, *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "tokens equal, log-probabilities within" in done.stdout
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["step"], r["src"], r["dst"]) for r in rows] == [("prefill", "tp", "cp"), ("prefill", "cp", "tp")]
    assert all(float(r["ready_p50"]) > 0 and float(r["cpu_splash"]) > 0 for r in rows)
    assert all(float(r["largest_difference"]) <= 1e-4 for r in rows)
    assert [r["kv"] for r in rows] == ["discard", "all_gather"]
    assert (tmp_path / "a.png").stat().st_size > 10_000
