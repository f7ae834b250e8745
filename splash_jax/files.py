"""Files as people hand them over and ask for them: text read alike everywhere, results written whole or not at all."""

import csv
import errno
import gzip
import io
import os
import shutil
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from splash_jax.errors import ConfigError

# The longer marks first: UTF-32's begins as UTF-16's does.
_FOREIGN = (
    ("UTF-32", (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")),
    ("UTF-16", (b"\xff\xfe", b"\xfe\xff")),
)
_GZIP = b"\x1f\x8b"


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A UTF-8 file to read, packed by gzip or not, without its byte order mark.

    Lines end at "\\n", "\\r\\n" or "\\r", all read as "\\n", and nowhere else: what `str.splitlines` takes for an end
    beside these (U+2028, U+0085, a form feed) is text. Raises ConfigError where the file cannot be read or is no UTF-8.
    """
    try:
        with path.open("rb") as plain:
            packed = plain.peek(2).startswith(_GZIP)
            stream = io.BufferedReader(gzip.GzipFile(fileobj=plain)) if packed else plain  # type: ignore[arg-type]
            _refuse_foreign(path, stream.peek(4))
            with io.TextIOWrapper(stream, encoding="utf-8-sig") as text:
                try:
                    yield text
                except UnicodeDecodeError as error:
                    at = stream.tell() - len(error.object) + error.start
                    raise ConfigError(f"{path} is not UTF-8 text (byte {at}); convert it first.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is a damaged gzip file ({error}); copy it again.") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}.") from error


def read_text(path: Path) -> str:
    """The text of a file, as `open_text` reads it."""
    with open_text(path) as text:
        return text.read()


def _refuse_foreign(path: Path, head: bytes) -> None:
    for name, marks in _FOREIGN:
        if head.startswith(marks):
            raise ConfigError(f"{path} is {name}, as its first bytes say, not UTF-8; save it as UTF-8.")


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Where to write what shall be in `path`: a file beside it, which takes its place at the end, or goes on an error.

    So `path` is complete, or as it was. What is no ordinary file (a device, a pipe), or stands in a folder that takes
    no new file, is written in place.
    """
    try:
        with nullcontext(path) if _in_place(path) else _beside(Path(os.path.realpath(path))) as made:
            yield made
    except OSError as error:
        if error.filename is None and error.errno is not None:  # of a write, which does not say where
            error.filename = str(path)
        raise


def _in_place(path: Path) -> bool:
    """Whether a target is a device or a pipe, a process's anonymous one too, whose real path is no file's."""
    return path.exists() and not path.is_file()


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    if target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK)):
        yield target
        return
    beside = target.with_name(f".{uuid.uuid4().hex}{target.suffix}")
    try:
        yield beside
        if target.exists():
            shutil.copymode(target, beside)
        try:
            beside.replace(target)
        except OSError:
            if not target.exists():
                raise
            shutil.copyfile(beside, target)  # it is mounted by itself: nothing can take its place
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, as `written` does."""
    with written(path) as made:
        made.write_text(text, encoding="utf-8")


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file, as `written` does: a line of columns, then a line for each row."""
    with written(path) as made, made.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, list(columns))
        writer.writeheader()
        writer.writerows(rows)


def check_target(path: Path | None) -> None:
    """Raise ConfigError, before a long run, for a file that could not be written after it. None: no file is asked for.

    Changes nothing.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name a file in it.")
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent}; make it first.")
        if _in_place(path):  # opening a pipe would end who reads it
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        target = Path(os.path.realpath(path))
        if target.exists():
            target.open("ab").close()
        if not target.exists() or (target.is_file() and os.access(target.parent, os.W_OK)):
            tried = target.with_name(f".{uuid.uuid4().hex}{target.suffix}")
            try:
                tried.write_bytes(bytes(4096))  # a full disk takes a name, but no block
            finally:
                tried.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} may not be written ({error.strerror}); choose another file.") from error
