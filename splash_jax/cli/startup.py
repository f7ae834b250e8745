"""A progress bar, on stderr, for what an engine does before it serves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

STDERR = Console(stderr=True, highlight=False)


@contextmanager
def startup_bars() -> Iterator[Callable[[str, int, int], None]]:
    """The `progress` callback of an LLM: one bar for each thing it reports, gone in silence where nobody looks."""
    columns = (TextColumn("{task.description:<18}"), BarColumn(30), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=STDERR, disable=not STDERR.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report
