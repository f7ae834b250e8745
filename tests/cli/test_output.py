"""Files that are asked for and text that is printed: neither takes the other along when it fails."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from splash_jax.cli.main import app, run
from splash_jax.cli.process import command, do_all, lasting_output
from splash_jax.cli.values import check_targets

ROOT = Path(__file__).resolve().parents[2]
AWKWARD = "naïve \u2028 \ufffd \U0001f30d"

# Prints what no code page of one byte has, more than a pipe holds, and after it writes a file.
SCRIPT = f"""
import sys
from pathlib import Path
from splash_jax.cli.process import command
from splash_jax.files import write_text
with command():
    for _ in range(9000):
        print({AWKWARD!r})
    write_text(Path(sys.argv[1]), "done")
    raise SystemExit(int(sys.argv[2]))
"""


DRAWN = """
import sys
from pathlib import Path
from splash_jax.cli.values import check_targets, pyplot
check_targets(plot=Path(sys.argv[1]))
plt = pyplot()
plt.figure()
plt.savefig(sys.argv[1])
print(plt.get_backend())
"""


def shell(line: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A line of bash; $RUN starts the script."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    known = os.environ | {"PYTHONPATH": str(ROOT), "RUN": f"{sys.executable} {script} {tmp_path / 'out.json'}"} | env
    command = ["bash", "-c", f"set -o pipefail; {line}"]
    return subprocess.run(command, cwd=tmp_path, env=known, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("$RUN 0 | head -n 1", 0, ""),
        ("$RUN 3 | true", 3, ""),
        ("$RUN 0 2>&1 | true", 0, ""),
        ("$RUN 0 >&-", 0, ""),
        ("$RUN 0 >/dev/full", 1, "error: not all of the text could be written (No space left on device).\n"),
        ("$RUN 0 >/dev/full 2>&1", 1, ""),
        ("PYTHONIOENCODING=cp1252 $RUN 0 >/dev/null", 0, ""),
        ("PYTHONIOENCODING=ascii $RUN 0 >/dev/null", 0, ""),
    ],
)
def test_a_run_outlasts_its_stdout(tmp_path, line, code, told, unbuffered):
    done = shell(line, tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (code, told)
    assert (tmp_path / "out.json").read_text() == "done"


def test_what_an_encoding_lacks_is_replaced(tmp_path):
    done = shell("PYTHONIOENCODING=cp1252 $RUN 0 | head -n 1 | iconv -f cp1252 -t utf-8", tmp_path)
    assert (done.stdout, done.stderr) == ("naïve ? ? ?\n", "")
    done = shell("PYTHONIOENCODING=cp1252:xmlcharrefreplace $RUN 0 | head -n 1 | iconv -f cp1252 -t utf-8", tmp_path)
    assert done.stdout == "naïve &#8232; &#65533; &#127757;\n"  # as the user's own setting says


def test_streams_of_others_are_left_alone():
    before = sys.stdout, sys.stderr
    mine = io.StringIO()
    sys.stdout = mine
    try:
        with lasting_output():
            assert sys.stdout is mine
            print("told")
    finally:
        sys.stdout = before[0]
    assert mine.getvalue() == "told\n" and sys.stderr is before[1]


def test_every_part_is_done_and_the_first_error_is_told():
    done: list[str] = []

    def fail(words: str) -> Callable[[], None]:
        def part() -> None:
            done.append(words)
            raise OSError(errno.ENOSPC, words)

        return part

    with pytest.raises(OSError, match="first"):
        do_all(fail("first"), lambda: done.append("text"), fail("second"))
    assert done == ["first", "text", "second"]


def test_a_folder_that_is_gone_is_told(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(SystemExit) as end:
        run(["plan", "small", "-T", "2"])
    assert end.value.code == 1
    assert "error: the folder that this runs in is gone; go to another one." in capsys.readouterr().err


# Of every command that writes: arguments, without a file, that end well in a moment.
PLAN = ["plan", "small", "-T", "2", "--src", "tp", "--dst", "dp"]
PRICE = ["plan", "small", "-T", "2", "--hardware", "cpu"]
SIMULATE = ["simulate", "deepseek-v3.2", "--dtype", "float8", "--requests", "3", "--ways", "tp", "--max-num-seqs", "4"]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [(PLAN, ["--json"]), (PRICE, ["--json", "--plot"]), (SIMULATE, ["--csv", "--log", "--plot"])],
    ids=["plan", "plan --hardware", "simulate"],
)
def test_files_are_there_before_anything_is_printed(tmp_path, monkeypatch, arguments, options):
    targets = [tmp_path / f"out{option}.png" for option in options]
    there: list[bool] = []

    def look(*args: object, **kwargs: object) -> None:
        there.append(all(target.stat().st_size > 0 for target in targets))

    for module in ("plan", "simulate"):
        monkeypatch.setattr(sys.modules[f"splash_jax.cli.{module}"], "_print", look)
    monkeypatch.setattr("splash_jax.cli.regimes.print_outlook", look)
    files = [word for option, target in zip(options, targets, strict=True) for word in (option, str(target))]
    done = CliRunner().invoke(app, [*arguments, *files])
    assert done.exit_code == 0, done.output
    assert there == [True]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [(PLAN, "--json"), (PRICE, "--json"), (SIMULATE, "--csv")],
    ids=["plan", "price", "simulate"],
)
def test_what_a_full_disk_does_not_take_is_still_printed(capsys, arguments, option):
    with pytest.raises(SystemExit) as end:
        run([*arguments, option, "/dev/full"])
    told = capsys.readouterr()
    assert end.value.code == 1 and "error: [Errno 28] No space left on device: '/dev/full'" in told.err
    assert len(told.out.splitlines()) > 5


@pytest.mark.parametrize("arguments", [PRICE, SIMULATE, ["preflight", "deepseek-v3.2"]])
def test_a_picture_of_no_kind_is_refused_before_the_run(tmp_path, capsys, arguments):
    for name in ("picture", "picture.xyz"):
        with pytest.raises(SystemExit) as end:
            run([*arguments, "--plot", str(tmp_path / name)])
        assert end.value.code == 2
        assert "ends in no kind of picture; name a .png, .svg or .pdf file" in " ".join(capsys.readouterr().err.split())


def test_results_that_cannot_be_written_are_refused_before_the_run(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "run.png").mkdir()
    below = str(tmp_path / "file" / "out")
    for arguments, words in (
        (["demo", "--out", below], "cannot be a folder (Not a directory); choose another"),
        (["demo", "--out", str(tmp_path)], "run.png is a folder; name a file in it"),
        (["calibrate", "--out", f"{below}/a.toml"], "cannot be a folder (Not a directory); choose another"),
        ([*PLAN, "--json", f"{below}.json"], "there is no folder"),
    ):
        with pytest.raises(SystemExit) as end:
            run(arguments)
        assert end.value.code == 2
        assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_no_result_takes_the_place_of_an_input_or_of_another(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("trace.csv", "prompts.txt", "here.toml", "table.csv"):
        Path(name).write_text("kept")
    os.symlink("trace.csv", "link.csv")
    simulate = ["simulate", "deepseek-v3.2"]
    for arguments, words in (
        (
            [*simulate, "--traffic", "azure:trace.csv", "--csv", "trace.csv"],
            "trace.csv is what this command reads too;",
        ),
        (
            [*simulate, "--traffic", "azure:./trace.csv", "--csv", "link.csv"],
            "link.csv is what this command reads too;",
        ),
        ([*simulate, "--table", "table.csv", "--log", "table.csv"], "--log: table.csv is what this command reads too;"),
        ([*simulate, "--csv", "run.x", "--log", "./run.x"], "--log: run.x is --csv's file too; name another file."),
        ([*simulate, "--csv", "-"], "--csv: - is stdout for --json only; name a file."),
        (["generate", "small", "--prompts-file", "prompts.txt", "--json", "prompts.txt"], "what this command reads"),
        (["plan", "small", "-T", "2", "--hardware", "here.toml", "--json", "here.toml"], "what this command reads"),
        (["preflight", "deepseek-v3.2", "--hardware", "here.toml", "--json", "here.toml"], "what this command reads"),
    ):
        with pytest.raises(SystemExit) as end:
            run(arguments)
        assert end.value.code == 2
        assert words in " ".join(capsys.readouterr().err.split())
    assert {path.read_text() for path in tmp_path.iterdir()} == {"kept"}
    check_targets(csv=Path("/dev/null"), log=Path("/dev/null"))


@pytest.mark.parametrize("backend", ["module://nowhere.inline", "nonsense", "tkagg"])
def test_a_picture_is_drawn_whatever_backend_was_inherited(tmp_path, backend):
    target = str(tmp_path / "a.png")
    env = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": backend}
    done = subprocess.run(
        [sys.executable, "-c", DRAWN, target], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.lower()) == (0, "agg\n"), done.stderr
    assert (tmp_path / "a.png").stat().st_size > 100


@pytest.mark.parametrize(("raised", "told"), [(MemoryError(), "MemoryError"), (MemoryError("7 TiB"), "7 TiB")])
def test_what_memory_does_not_hold_is_one_line(capsys, raised, told):
    with pytest.raises(SystemExit) as end, command():
        raise raised
    assert end.value.code == 1
    assert (
        capsys.readouterr().err == f"error: there is not enough memory for what was asked for ({told}); ask for less.\n"
    )


def test_json_on_a_stdout_that_is_closed(monkeypatch):
    from splash_jax.cli.values import write_json

    monkeypatch.setattr(sys, "stdout", None)
    write_json(Path("-"), {"a": 1})
