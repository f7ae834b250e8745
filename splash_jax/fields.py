"""Fields of tables and traces that people hand over: each is taken for exactly what it says, or refused.

What is refused raises ValueError with the value and what to write instead; whoever reads a file adds where it stands.
"""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path

from splash_jax.errors import ConfigError
from splash_jax.files import open_text

MOST_TOKENS = 10**12
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d+))? ?(?:(Z|UTC)|([+-])(\d\d):?(\d\d)?)?", re.ASCII | re.IGNORECASE
)


def tokens(value: object) -> int:
    """A number of tokens, from text or JSON: 12, 12.0 and 1e3 are whole numbers; -1, 1.5, true and 1,024 are none."""
    wrong = ValueError(f"{value!r} is not a number of tokens; write a whole number from 0 to {MOST_TOKENS}, as 1024.")
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        exact = Decimal(value.strip())
    elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST_TOKENS:
        exact = Decimal(value)
    else:
        raise wrong
    if not 0 <= exact <= MOST_TOKENS or exact != int(exact):
        raise wrong
    return int(exact)


def number(value: object) -> float:
    """A finite number, from text or JSON."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        found = float(value.strip())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value) if abs(value) < 1e308 else math.inf  # a whole number may be longer than a float can be
    else:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{value!r} is not a finite number; write it as 0.25 or 1e-3.")
    return found


def stamp(value: object) -> tuple[int, float]:
    """A moment as whole seconds since 1970 and the fraction of one, read whole: 2024-05-12 00:00:01.5+02:00.

    A space or T stands between day and time. The fraction may have any number of digits or be missing, the zone be Z,
    UTC, +02:00, +0200 or +02; where none is named it is UTC, whatever zone this machine is in.
    """
    match = _STAMP.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        if match is None:
            raise ValueError
        day, time, fraction, _, sign, hours, minutes = match.groups()
        offset = timedelta(hours=int(hours or 0), minutes=int(minutes or 0)) * (-1 if sign == "-" else 1)
        whole = datetime.fromisoformat(f"{day}T{time}").replace(tzinfo=timezone(offset)).astimezone(UTC)
    except (ValueError, OverflowError):
        form = "2024-05-12 00:00:01.5, or with a zone, Z or +02:00"
        raise ValueError(f"{value!r} is not a time; write it as {form}.") from None
    return int(whole.timestamp()), float(f"0.{fraction or 0}")


def csv_rows(path: Path, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and fields of every row of a CSV file whose first line names its columns.

    Columns that are `needed` are found in any case and with spaces around them; others come along by their names.
    Lines without a value are skipped; values that a line lacks are empty. Raises ConfigError for a column that is
    missing or twice there, and for a row with more values than columns, as an unquoted 1,024 makes it.
    """
    named = {name.casefold(): name for name in needed}
    with open_text(path) as text:
        reader = csv.reader(text, strict=True)
        try:
            first = [name.strip() for name in next(reader, [])]
            header = [named.get(name.casefold(), name) for name in first]
            named_twice = [name for name in header if name and header.count(name) > 1]
            if not set(needed) <= set(header) or named_twice:
                raise ConfigError(
                    f"{path}: line 1 has columns {first}; needed are {', '.join(needed)}, each once, between commas."
                )
            for row in reader:
                if not any(cell.strip() for cell in row):
                    continue
                if len(row) > len(header):
                    raise ConfigError(
                        f"{path}: line {reader.line_num} has {len(row)} values for {len(header)} columns: {row}; write "
                        "numbers without thousands separators, and quote values with a comma."
                    )
                yield reader.line_num, dict(zip_longest(header, row, fillvalue=""))
        except csv.Error as error:
            raise ConfigError(f"{path}: line {reader.line_num} is not CSV ({error}); correct it.") from error
