"""Progress is seen in a terminal and out of the way elsewhere."""

import io
import time

from rich.console import Console

from whet.cli.progress import Progress
from whet.interfaces.logger import Logger


def shown(terminal: bool, quiet_seconds: float = 30.0) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=80, _environ={"TERM": "xterm"})
    progress = Progress(console, quiet_seconds)
    assert isinstance(progress, Logger)
    for percent in (0, 50):
        progress.status(f"[b]evaluation\x1b[2J {percent} %")
        time.sleep(0.6)  # longer than the display waits between two refreshes
    progress.status("")
    progress.close(False)
    progress.close(False)
    return file.getvalue()


def test_in_a_terminal_a_line_is_rewritten_and_taken_away() -> None:
    found = shown(terminal=True)
    assert "[b]evaluation\\x1b[2J 50 %" in found
    assert "0:00:0" in found
    assert found.endswith("\x1b[2K")


def test_elsewhere_a_line_is_printed_after_a_long_silence() -> None:
    assert shown(terminal=False) == ""
    assert shown(terminal=False, quiet_seconds=0.5) == "waiting on: [b]evaluation\\x1b[2J 50 %\n"
