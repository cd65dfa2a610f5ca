"""The last words of a process: the end of its output, with the exception that it ended with."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

TRACEBACK = "Traceback (most recent call last):"
"""The first line of a traceback."""
_WARNING = re.compile(r"\b(?:[A-Za-z]*Warning:|WARN(?:ING)?\b)")


def last_words(log: Path, begin: int = 0, lines: int = 20) -> str:
    """Return the last lines of a process's log and the lines of its fatal error, without control characters."""
    try:
        with log.open("rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - (1 << 16)))
            return printable(file.read(), lines)
    except OSError:
        return ""


def printable(text: bytes, lines: int = 20) -> str:
    """Return the last lines of output as text, see `last_lines`. Control characters are escaped."""
    kept = last_lines(text.decode(errors="replace").rstrip().splitlines(), lines)
    return "\n".join(
        "".join(letter if letter.isprintable() or letter == "\t" else repr(letter)[1:-1] for letter in line)[:2000]
        for line in kept
    )


def last_error(text: str) -> str:
    """Return the exception at the end of the last traceback in a text; empty: there is none."""
    lines = text.splitlines()
    return "\n".join(lines[_last_error(lines)])


def last_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return the last lines of an output, at most `most`.

    If the output has a traceback, they include the exception at its end. Warnings after it are then left out, and the
    oldest of the other lines after it as well if there are too many. A traceback that is still being written is left
    out.
    """
    error, begin = _last_error(lines), _last_traceback(lines)
    if not lines[error]:
        return last_lines(lines[:begin], most) if 0 < begin < len(lines) else list(lines[-most:])
    rest = _without_warnings(lines[error.stop :])
    room = most - (error.stop - error.start)
    if len(rest) <= room:
        return [*lines[: error.stop], *rest][-most:]
    return [*lines[error], *rest[len(rest) - room :]]


def _last_error(lines: Sequence[str]) -> slice:
    """Return the range of lines of the exception at the end of the last traceback; empty: there is none."""
    for i in range(_last_traceback(lines) + 1, len(lines)):
        if lines[i] and not lines[i][0].isspace():
            return slice(i, i + 1 + len(continued(lines[i + 1 :])))
    return slice(0, 0)


def _last_traceback(lines: Sequence[str]) -> int:
    return next((i for i in reversed(range(len(lines))) if lines[i].startswith(TRACEBACK)), len(lines))


def _without_warnings(lines: Sequence[str]) -> list[str]:
    """Return the lines without warnings and without the lines of code that Python quotes beneath a warning."""
    kept, warned = [], False
    for line in lines:
        warned = bool(_WARNING.search(line)) or (warned and line[:1].isspace())
        if not warned:
            kept.append(line)
    return kept


def continued(lines: Sequence[str]) -> list[str]:
    """Return the lines that continue an error's message: up to three indented lines that are not of a traceback."""
    found: list[str] = []
    for line in lines[:3]:
        if not line.startswith("  ") or line.lstrip().startswith(("File ", "^")):
            break
        found.append(line.rstrip())
    return found
