"""A run as it happens: a live picture on a terminal, plain lines elsewhere."""

from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from splash_jax.engine import StepRecord

WIDTH = 24  # characters of a full bar
EVERY = 20  # steps between two plain lines


class RunView:
    """Shows every `StepRecord` it is given. `total` is the number of tokens the run will draw."""

    def __init__(self, console: Console, name: str, total: int) -> None:
        self.console, self.name, self.total = console, name, total
        self.tokens, self.steps, self.path = 0, 0, ""
        self._live = Live(console=console, refresh_per_second=10) if console.is_terminal else None

    def __enter__(self) -> "RunView":
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.__exit__(kind, error, trace)

    def step(self, record: "StepRecord") -> None:
        """Take one more step's record."""
        self.tokens += record.drawn
        switched = record.switch is not None
        self.path += f" -> {record.layout}" if switched else "" if self.path else record.layout
        if self._live:
            self._live.update(self._picture(record))
        elif switched or self.steps % EVERY == 0:
            switch = f"  switched {record.switch.before.layout} -> {record.layout}" if record.switch else ""
            self.console.print(f"  {self._line(record)}{switch}", soft_wrap=True)
        self.steps += 1

    def _line(self, record: "StepRecord") -> str:
        running = sum(record.running_by_home)
        return (
            f"step {self.steps:>3}  layout {record.layout:<3}  running {running:>2}"
            f"  tokens {self.tokens:>5,} of {self.total:,}"
        )

    def _picture(self, record: "StepRecord") -> Group:
        table = Table(box=None, padding=(0, 1), show_edge=False)
        table.add_column("rank", justify="right")
        table.add_column("requests that call it home", min_width=WIDTH)
        table.add_column("KV pages in use", min_width=WIDTH + 10)
        for rank, (running, used) in enumerate(zip(record.running_by_home, record.pages_used, strict=True)):
            pages = f"{_bar(used / record.pages_per_rank)} {used}/{record.pages_per_rank}"
            table.add_row(str(rank), Text("■" * running, "blue"), Text(pages, "green"))
        return Group(Text(f"{self.name}: {self.path}", "bold"), Text(self._line(record)), table)


def _bar(share: float) -> str:
    full = round(min(1.0, share) * WIDTH)
    return "█" * full + "░" * (WIDTH - full)
