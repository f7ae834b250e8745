"""What a log shows of a long preparation."""

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
