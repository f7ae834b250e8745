"""What a log shows of a long preparation."""

import pytest

from splash_jax import progress


def test_a_log_gets_a_line_at_the_beginning_each_minute_and_at_the_end(monkeypatch, capfd):
    clock = iter([0.0, 10.0, 61.0, 90.0, 125.0, 130.0])
    monkeypatch.setattr(progress, "perf_counter", lambda: next(clock))
    with progress.progress_report() as report:
        for done in range(6):
            report("compiling programs", done, 5)
    assert capfd.readouterr().err.splitlines() == [
        "compiling programs ...",
        "compiling programs: 2 of 5 after 61 s",
        "compiling programs: 4 of 5 after 125 s",
        "compiling programs: done after 130 s",
    ]


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("1", 1), ("132", 132)])
def test_a_terminal_without_columns_still_gets_its_text(monkeypatch, capsys, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    console = progress.make_console()
    assert console.width == width
    console.print("text")
    assert "".join(capsys.readouterr().out.split()) == "text"
