"""Tables in narrow places: words wrap, numbers stay whole."""

from io import StringIO

import pytest
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from splash_jax.cli.values import print_table


def printed(width: int) -> list[str]:
    table = Table(title="A title that is longer than the table", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("why")
    for name in ("all ranks' tokens", "size"):
        table.add_column(name, justify="right")
    table.add_row("it no longer fits there", "10,052,864", "1.27 MiB")
    table.add_row("", "5", "")
    target = StringIO()
    print_table(Console(file=target, width=width), table)
    return target.getvalue().splitlines()


@pytest.mark.parametrize("width", [1, 20, 33, 40, 60, 200])
def test_numbers_are_neither_shortened_nor_broken(width):
    lines = printed(width)
    assert "…" not in "".join(lines)
    (row,) = [line for line in lines if "10,052,864" in line]
    assert row.rstrip().endswith("10,052,864   1.27 MiB")
    assert "longer" in "".join(lines) and "ranks'" in "".join(lines)


def test_words_wrap_as_far_as_they_must():
    rows = {width: [line.split() for line in printed(width)] for width in (1, 200)}
    assert ["it", "no", "longer", "fits", "there", "10,052,864", "1.27", "MiB"] in rows[200]
    assert ["it", "no", "10,052,864", "1.27", "MiB"] in rows[1] and ["longer"] in rows[1]
    assert max(map(len, printed(200))) < 70  # no wider than it needs
