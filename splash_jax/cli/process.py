"""What a command does to its process before JAX is imported, and how it ends when something is wrong."""

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from splash_jax.errors import ConfigError, EngineFailed, SplashError
from splash_jax.platforms import on_cpu


def prepare_process(num_devices: int) -> None:
    """Ask for virtual CPU devices, and for the threads that they need. Leaves accelerators and a running JAX alone.

    JAX reads all of it when it starts. Collectives on virtual devices deadlock with few threads, hence NPROC.
    """
    if "jax" in sys.modules or not on_cpu():
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["NPROC"] = os.environ.get("NPROC") or "32"
    flags = os.environ.get("XLA_FLAGS", "")
    if "host_platform_device_count" not in flags and "JAX_NUM_CPU_DEVICES" not in os.environ:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={num_devices}".strip()


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn the errors a user can meet into one line on stderr and exit code 1. The rest is bugs and keeps its trace."""
    try:
        yield
    except EngineFailed:
        raise
    except (SplashError, OSError, MemoryError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError):
            text = f"there is not enough memory for what was asked for ({text or 'MemoryError'}); ask for less."
        print(f"error: {text or type(error).__name__}", file=sys.stderr)
        raise SystemExit(1) from None


@contextmanager
def lasting_output() -> Iterator[None]:
    """Nothing that happens to stdout or stderr ends a run: files that were asked for are still written.

    What the terminal's encoding lacks is replaced. Once nobody reads (`| head`), the rest of the text is dropped and
    the command ends with its own exit code. Where text is lost otherwise (a full disk), it is an error at the end.
    """
    before = sys.stdout, sys.stderr
    lasting = [_lasting(stream) for stream in before]
    sys.stdout, sys.stderr = lasting
    try:
        try:
            yield
        except SystemExit as end:
            if not end.code:
                _complain(lasting)
            raise
        else:
            _complain(lasting)
    finally:
        for stream in filter(None, lasting):
            stream.flush()
        sys.stdout, sys.stderr = before


class _Lasting(io.FileIO):
    """A file that takes whatever it is given, and remembers why it could not keep it."""

    failed: OSError | None = None

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.failed is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failed = error
        return len(data)


def _lasting(stream: Any) -> Any:
    """A text stream over the same file that outlasts its reader; as it is where it is none of the process's own."""
    buffer = getattr(stream, "buffer", None)
    raw = _raw(stream)
    if not isinstance(raw, io.FileIO):
        return stream
    stream.flush()
    lasting = _Lasting(raw.fileno(), "w", closefd=False)
    errors = "replace" if stream.errors in ("strict", "surrogateescape") else stream.errors
    return io.TextIOWrapper(
        lasting if raw is buffer else io.BufferedWriter(lasting),  # type: ignore[arg-type]
        encoding=stream.encoding, errors=errors, line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )  # fmt: skip


def _raw(stream: Any) -> Any:
    """What a text stream writes its bytes to in the end: under `python -u` there is no buffer between."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _complain(streams: list[Any]) -> None:
    for stream in filter(None, streams):
        stream.flush()
        failed = getattr(_raw(stream), "failed", None)
        if failed is not None and failed.errno != errno.EPIPE:
            print(f"error: not all of the text could be written ({failed.strerror}).", file=sys.stderr)
            raise SystemExit(1)


@contextmanager
def command() -> Iterator[None]:
    """What a command or a script runs in: `one_line_errors` and `lasting_output`."""
    with lasting_output(), one_line_errors():
        try:
            os.getcwd()
        except FileNotFoundError:
            raise ConfigError("the folder that this runs in is gone; go to another one.") from None
        yield


def do_all(*parts: Callable[[], object]) -> None:
    """Do every part, though one before it failed, and raise the first error: a full disk hides no text."""
    failed: Exception | None = None
    for part in parts:
        try:
            part()
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed
