"""How far a long preparation is, on stderr: bars where somebody looks, a line at its beginning and end elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

STDERR = Console(stderr=True, highlight=False)

Report = Callable[[str, int, int], None]  # what, done, in all


@contextmanager
def progress_report() -> Iterator[Report]:
    """The `progress` callback of an LLM: one bar, or two lines, for each thing it reports."""
    if not STDERR.is_terminal:
        yield _lines()
        return
    columns = (TextColumn("{task.description:<18}"), BarColumn(30), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=STDERR) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report


def _lines() -> Report:
    began: dict[str, float] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in began:
            began[what] = perf_counter()
            STDERR.print(f"{what} ...", soft_wrap=True)
        if done == total:
            STDERR.print(f"{what}: done after {perf_counter() - began[what]:.0f} s", soft_wrap=True)

    return report
