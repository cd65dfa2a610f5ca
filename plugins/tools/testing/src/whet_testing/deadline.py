"""A deadline for code under test that may hang and never return."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Fail the test when the body takes longer than `seconds`, even if the body catches every `Exception`.

    In the main thread of a POSIX process the deadline interrupts Python code and regular expressions. Elsewhere the
    test fails only after the body has ended.
    """
    begin = time.monotonic()
    message = f"{what} took longer than {seconds:g} seconds"

    def overdue(number: int, frame: FrameType | None) -> None:
        pytest.fail(message)

    interrupts = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not interrupts:
        yield
    else:
        previous = signal.signal(signal.SIGALRM, overdue)
        remaining, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
            if remaining:  # pytest-timeout uses the same timer
                signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - begin), 0.001))
    if time.monotonic() - begin > seconds:
        pytest.fail(message)
