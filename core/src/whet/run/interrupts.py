"""Handles Ctrl-C outside the steps of a run, and acknowledges each signal at once.

moment      first Ctrl-C                                  Ctrl-C again
start-up    the run ends; what was started is closed      the process ends; the watchdog kills the workers
a step      finish, save, end; see `whet.run.steps`       the run ends without saving; what was started is closed
export      the model is written, then the run ends       the run ends without the model
a job       an evaluation or an export ends               the process ends; the watchdog kills the workers
closing     closing goes on                               the process ends; the watchdog kills the workers
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from attrs import define, field

Moment = Literal["start-up", "export", "job", "closing"]

ERASE_LINE = "\r\x1b[2K"
CLOSING = "closing the workers; Ctrl-C again does not wait for them"
STARTING_UP = f"ending before the first step; {CLOSING}"
JOB = f"ending without a result; {CLOSING}"
AT_ONCE = f"ending at once, without saving; {CLOSING}"
EXPORTING = "writing the model, then ending; Ctrl-C again ends at once, without the model"
WITHOUT_MODEL = f"ending at once, without the model; {CLOSING}"


@define
class Interrupts:
    """Handles Ctrl-C while no step is under way. Without `listening` it handles nothing."""

    moment: Moment = "start-up"
    """Set by the run as it goes on."""
    pressed: bool = False
    """Whether Ctrl-C was pressed, and the run has not ended yet."""
    abandon: bool = field(default=False, init=False)
    """Whether the user knows that the next Ctrl-C does not wait for workers to close."""

    @contextmanager
    def listening(self) -> Iterator["Interrupts"]:
        """Handle Ctrl-C during the body; only in the main thread, where Python allows it."""
        with on_signals(self._on_signal, [signal.SIGINT]):
            yield self

    @contextmanager
    def then_closing(self) -> Iterator[None]:
        """Mark the run as closing after the block, even if the block raises."""
        try:
            yield
        finally:
            self.moment = "closing"

    def at_once(self) -> None:
        """Acknowledge the Ctrl-C that ends a run without saving, and end it."""
        self._end(AT_ONCE)

    def _on_signal(self, number: int) -> None:
        if self.moment == "closing":
            if self.abandon:
                _exit()
            self.abandon = True
            acknowledge(number, CLOSING)
        elif self.moment == "export" and not self.pressed:
            self.pressed = True
            acknowledge(number, EXPORTING)
        else:
            self._end({"export": WITHOUT_MODEL, "job": JOB}.get(self.moment, STARTING_UP))

    def _end(self, words: str) -> None:
        self.moment, self.abandon = "closing", True
        acknowledge(signal.SIGINT, words)
        raise KeyboardInterrupt


def acknowledge(number: int, words: str) -> None:
    """Write on stderr that a signal was received, and what happens now."""
    announce(f"{'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}: {words}")


def announce(line: str) -> None:
    """Write a line on stderr about what happens to the run, also while a live display is shown."""
    # The program that reads stderr may have received the Ctrl-C, too, and be gone.
    with suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty():
            # Without Python's buffers: a live display may be in the middle of a line. The line with ^C is erased.
            dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
            os.write(sys.stderr.fileno(), f"{chr(10) if dumb else ERASE_LINE}{line}\n".encode())
            return
        try:
            print(line, file=sys.stderr, flush=True)
        except RuntimeError:  # the signal came in the middle of another print
            os.write(2, f"{line}\n".encode())


@contextmanager
def on_signals(function: Callable[[int], None], numbers: list[signal.Signals] | None = None) -> Iterator[None]:
    """Call a function on SIGTERM, SIGUSR1, SIGINT and SIGHUP, or on the signals given; only in the main thread."""
    if numbers is None:
        # Under nohup, SIGHUP is ignored, and must stay ignored.
        hangups = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
        numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, *hangups]
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda n, _: function(n)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit() -> None:
    """End the process, and leave its workers to the watchdog."""
    with suppress(OSError):
        if os.isatty(1):
            os.write(1, b"\x1b[?25h\n")  # a live display hides the cursor
    os._exit(128 + signal.SIGINT)
