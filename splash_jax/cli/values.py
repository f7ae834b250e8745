"""Values of options: sizes, switches, models. What cannot be meant is a usage error (exit code 2)."""

import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

import splash_jax
from splash_jax.errors import ConfigError
from splash_jax.files import check_target, write_text, written

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(?:iB|B)?", re.IGNORECASE)
_COUNT = re.compile(r"\d{1,18}")


def model_path(name: str) -> Path:
    """A checkpoint directory; `small` is the one that comes with the package."""
    return splash_jax.small_model() if name == "small" else Path(name)


def byte_size(text: str) -> int:
    """Bytes of 64M, 1G, 1.5GiB or 1000; units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size in bytes; write 64M, 1G or 1000000.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def switch_steps(texts: list[str]) -> dict[int, tuple[str, str]]:
    """Step -> (layout, mode) of options like 40:dp or 40:dp:spread, in order of steps."""
    switches: dict[int, tuple[str, str]] = {}
    for text in texts:
        step, *move = text.split(":")
        if not _COUNT.fullmatch(step) or len(move) not in (1, 2) or not all(move):
            raise typer.BadParameter(
                f"{text!r} is not STEP:LAYOUT or STEP:LAYOUT:MODE; write 40:dp or 40:dp:spread.", param_hint="--switch"
            )
        if int(step) in switches:
            raise typer.BadParameter(f"step {step} has two switches; give it one.", param_hint="--switch")
        switches[int(step)] = (move[0], move[1] if len(move) > 1 else "splash")
    return dict(sorted(switches.items()))


def mesh_sizes(text: str) -> dict[str, int]:
    """Axes and sizes of options like node=2,chip=4, in this order."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not axis or not _COUNT.fullmatch(size) or int(size) < 1:
            raise typer.BadParameter(f"{text!r} is not AXIS=SIZE,...; write node=2,chip=4.", param_hint="--mesh")
        if axis in sizes:
            raise typer.BadParameter(f"axis {axis!r} has two sizes; give it one.", param_hint="--mesh")
        sizes[axis] = int(size)
    return sizes


def mesh_and_ranks(mesh: str | None, num_devices: int | None) -> tuple[dict[str, int] | None, int]:
    """The mesh of an option and the number of devices: as told, what the mesh has, or 1."""
    sizes = None if mesh is None else mesh_sizes(mesh)
    return sizes, num_devices or math.prod((sizes or {}).values())


def token_counts(text: str) -> list[int]:
    """Numbers of tokens of options like 40,100."""
    parts = [part.strip() for part in text.split(",")]
    if any(not _COUNT.fullmatch(part) or int(part) < 1 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of token counts; write 40,100,100.", param_hint="--tokens")
    return [int(part) for part in parts]


def in_bytes(count: float) -> str:
    """A number of bytes as people read it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 999.5 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def in_ms(seconds: float) -> str:
    """A duration as people read it, in milliseconds, in seconds from ten on."""
    if seconds >= 9.995:
        return f"{seconds:,.1f} s" if seconds < 999.5 else f"{seconds:,.0f} s"
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.0f} ms" if milliseconds >= 999.5 else f"{milliseconds:.3g} ms"


def print_table(console: Console, table: Table) -> None:
    """Print a table whose numbers, the columns to the right, are never shortened or broken; other words may wrap.

    What then is wider than the console is printed all the same: files and pipes have no edge.
    """
    free = console.options.update(width=10**6)
    for column in table.columns:
        cells = [Measurement.get(console, free, cell) for cell in column.cells]
        widths = [cell.maximum if column.justify == "right" else cell.minimum for cell in cells]
        column.min_width = max(Measurement.get(console, free, column.header).minimum, *widths, 0)
    least = Measurement.get(console, free, table).minimum
    if least > console.width:
        table.width = least
    console.print(table, crop=False)


def check_targets(*, reads: Iterable[str | Path | None] = (), **targets: Path | None) -> None:
    """Refuse, before a long run, files that could not be written after it. Each by its option: json=Path("a.json").

    Nor may they be those that the command `reads`, or the same: one would be lost without a word.
    """
    taken = {os.path.realpath(path): "what this command reads" for path in reads if path and os.path.isfile(path)}
    for name, target in targets.items():
        if target is None or (name == "json" and str(target) == "-"):
            continue
        if str(target) == "-":
            raise typer.BadParameter("- is stdout for --json only; name a file.", param_hint=f"--{name}")
        whose = taken.setdefault(os.path.realpath(target), f"--{name}'s file")
        if whose != f"--{name}'s file" and not target.is_char_device():
            raise typer.BadParameter(f"{target} is {whose} too; name another file.", param_hint=f"--{name}")
        try:
            check_target(target)
        except ConfigError as error:
            raise typer.BadParameter(str(error), param_hint=f"--{name}") from None
        if name == "plot":
            _check_picture(target)


def make_folder(folder: Path, option: str) -> None:
    """Make a folder of results before the run, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"{folder} cannot be a folder ({error.strerror}); choose another.", param_hint=option
        ) from None


def pyplot() -> Any:
    """Matplotlib's pyplot, for files only.

    A command may have inherited a notebook's MPLBACKEND, or a window's, which can be unknown or missing here.
    """
    os.environ["MPLBACKEND"] = "agg"
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    return plt


def _check_picture(target: Path) -> None:
    pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if target.suffix.lower().lstrip(".") not in known:
        raise typer.BadParameter(
            f"{target} ends in no kind of picture; name a .png, .svg or .pdf file.", param_hint="--plot"
        )


def save_figure(figure: "Figure", target: Path, dpi: int) -> None:
    """Write a picture of the kind that the file's ending says."""
    with written(target) as made:
        figure.savefig(made, dpi=dpi, format=target.suffix.lower().lstrip(".") or "png")


def write_json(target: Path, value: Any) -> None:
    """Write a value as JSON into a file; `-` is stdout."""
    text = json.dumps(value, indent=1)
    if str(target) == "-":
        typer.echo(text)
    else:
        write_text(target, text + "\n")
