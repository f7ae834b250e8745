"""Ctrl-C waits for the end of a step, so that stopping a run does not cost the engine."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Let the first SIGINT take effect when the block has ended; a second one goes through at once.

    Python delivers signals to the main thread only, so nothing is done in another.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            handler(number, frame)
        held.append(frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if len(held) == 1:
        handler(signal.SIGINT, held[0])
