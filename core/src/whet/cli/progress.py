"""What a slow command shows on stderr while it works: what it is waiting for, and for how long."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import Progress as Display
from rich.progress import TextColumn, TimeElapsedColumn

QUIET_SECONDS = 30.0
"""Without a terminal: the longest time without a line."""


class Progress:
    """A line that is rewritten in a terminal, and printed now and then elsewhere. It has the methods of a `Logger`."""

    def __init__(self, console: Console | None = None, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._quiet_seconds, self._spoke = quiet_seconds, time.monotonic()
        live = self._console.is_terminal and not self._console.is_dumb_terminal
        columns = (TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
        # Two refreshes a second: the display must not compete with the work for the cores.
        display = Display(*columns, console=self._console, transient=True, refresh_per_second=2) if live else None
        self._display, self._task = display, display.add_task("") if display else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing: there are no steps."""

    def status(self, text: str) -> None:
        """Show what the command is waiting for."""
        shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)[:100]
        if self._display is not None and self._task is not None:
            self._display.start()
            self._display.update(self._task, description=shown)
        elif text and time.monotonic() - self._spoke >= self._quiet_seconds:
            self._console.print(f"waiting on: {shown}", markup=False, soft_wrap=True)
            self._spoke = time.monotonic()

    def rewind(self, step: int) -> None:
        """Do nothing: there are no steps."""

    def close(self, failed: bool) -> None:
        """Remove the line."""
        if self._display is not None:
            self._display.stop()
