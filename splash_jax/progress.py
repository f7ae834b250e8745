"""How far a long preparation is, on stderr: bars where somebody looks, a line now and then elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

WIDTH = 80  # columns, where the terminal says that it has none
EVERY_S = 60  # between two lines of one thing

Report = Callable[[str, int, int], None]  # what, done, in all


def make_console(*, stderr: bool = False, **options: Any) -> Console:
    """A console to print on. COLUMNS=0, as terminals without a size pass on, would have rich print nothing at all."""
    made = Console(stderr=stderr, highlight=False, **options)
    if made.width < 1:
        made.width = WIDTH
    return made


STDERR = make_console(stderr=True)


@contextmanager
def progress_report() -> Iterator[Report]:
    """The `progress` callback of an LLM: a bar for each thing, or lines as it begins, each minute, and as it ends."""
    if not STDERR.is_terminal:
        yield _lines()
        return
    columns = (TextColumn("{task.description:<42}"), BarColumn(30), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=STDERR) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report


def _lines() -> Report:
    began: dict[str, float] = {}
    told: dict[str, float] = {}

    def report(what: str, done: int, total: int) -> None:
        now = perf_counter()
        if what not in began:
            began[what] = told[what] = now
            STDERR.print(f"{what} ...", soft_wrap=True)
        seconds = f"after {now - began[what]:.0f} s"
        if done == total:
            STDERR.print(f"{what}: done {seconds}", soft_wrap=True)
        elif now - told[what] >= EVERY_S:
            told[what] = now
            STDERR.print(f"{what}: {done} of {total} {seconds}", soft_wrap=True)

    return report
