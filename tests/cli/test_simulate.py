"""`splash simulate`: its table, its files, its picture, and its refusals."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from splash_jax.cli.main import app
from splash_jax.errors import ConfigError
from splash_jax.scheduler import replay

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ["simulate", "deepseek-v3.2", "--dtype", "float8", "--every", "64", "--max-num-seqs", "64"]
AZURE = f"azure:{ROOT / 'tests' / 'data' / 'traces' / 'azure_conv_2023_head.csv'}"


def splash(*arguments: str):
    return CliRunner().invoke(app, [*SMALL, *arguments])


def test_a_trace_by_the_cost_model_with_all_its_files(tmp_path):
    out, plot, log = (tmp_path / name for name in ("ways.csv", "run.png", "run.jsonl"))
    done = splash(
        "--traffic", AZURE, "--requests", "12", "--ways", "dp,policy", "--csv", str(out), "--plot", str(plot),
        "--log", str(log),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "…" not in done.output
    assert "12 requests of azure" in done.output and "by the cost model" in done.output
    with out.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["way"] for row in rows] == ["dp", "policy", "hindsight"]
    assert all(float(row["seconds"]) > 0 and float(row["tokens_per_second"]) > 0 for row in rows)
    assert len(list(replay(log.read_text().splitlines()))) > 0
    from matplotlib.image import imread

    picture = imread(plot)
    assert picture.shape[:2] == (960, 1440)
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 50


def test_what_does_not_fit_is_said_with_what_simulate_offers():
    runner, large = CliRunner(), ["simulate", "deepseek-v3.2", "--requests", "2"]
    done = runner.invoke(app, large)
    assert isinstance(done.exception, ConfigError)
    words = str(done.exception)
    assert words.endswith("Raise device_memory_bytes or num_devices. --dtype float8 has smaller weights.")
    assert re.search(r"160\.\d\d GiB per rank lack \d+\.\d\d GiB", words)
    done = runner.invoke(app, [*large, "--dtype", "float8", "--device-memory-bytes", "50G"])
    assert "50.00 GiB per rank lack" in str(done.exception) and "float8" not in str(done.exception)
    roomy = ["--traffic", AZURE, "--ways", "tp", "--device-memory-bytes", "250G"]
    assert runner.invoke(app, [*large, *roomy]).exit_code == 0


def test_ways_are_told_on_stderr_as_they_end():
    done = splash("--traffic", AZURE, "--requests", "4", "--ways", "tp,dp")
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and "s of traffic served" not in done.stdout
    for name, line in zip(("tp", "dp"), lines, strict=True):
        assert re.fullmatch(rf"{name}: [\d.,]+ s of traffic served, [\d.,]+ s after the start", line)


def test_measured_tables_may_be_the_clock():
    table = ROOT / "tests" / "data" / "paper" / "table4_b200.csv"
    done = splash("--traffic", AZURE, "--requests", "10", "--ways", "policy", "--table", str(table))
    assert done.exit_code == 0, done.output
    assert "table4_b200.csv, decode steps of 0.035 s" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--traffic", "storm"], "no traffic 'storm'; choose rollout, rollouts, alternating"),
        (["--traffic", "azure:"], "no traffic 'azure:'"),
        (["--traffic", AZURE, "--ways", "dp,best"], "no way best; there are: tp, dp, cp, dop"),
        (["--groups", "2", "--plot", "run.png"], "a fleet has no one run to draw or log"),
        (["--csv", "/nowhere/at/all.csv"], "there is no folder /nowhere/at; make it first"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(arguments, words):
    done = splash(*arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())
