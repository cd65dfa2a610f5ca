"""Why a process ended: the errors in its log, and in the logs of the processes that it started."""

import re
from collections.abc import Sequence
from pathlib import Path

_ERROR = re.compile(r"^(?:\[\w+\] )?(?:\(\w+[^)]*\) )?((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b.*)$")
_ELSEWHERE = ("root cause", "initialization failed", "died during initialization", "keyboardinterrupt", "systemexit")
"""Words of errors that only report that another error happened."""
_TRACEBACK = "Traceback (most recent call last):"
_WARNING = re.compile(r"\b(?:[A-Za-z]*Warning:|WARN(?:ING)?\b)")
MOST_LINES = 12


def causes(log: Path, *further: Path) -> str:
    """Return the errors in the first of an engine's logs that has any; otherwise the last lines of the first log."""
    said = (errors(one) for one in (log, *further))
    return next(filter(None, said), "") or _cut([line for line in _lines(log) if line.strip()])


def errors(log: Path) -> str:
    """Return the last errors of an engine's log, in the order of the log; empty: there are none."""
    lines, found = _lines(log), []
    for number, line in enumerate(lines):
        match = _ERROR.match(line)
        if match and not points_elsewhere(match[1]):
            found.append("\n".join([match[1], *_continued(lines[number + 1 :])]))
    return _cut(list(dict.fromkeys(found)))


def points_elsewhere(error: str) -> bool:
    """Return whether an error only reports that another error happened, e.g. that the other end of a pipe is closed."""
    return error == "EOFError" or any(words in error.lower() for words in _ELSEWHERE)


def last_error(text: str) -> str:
    """Return the exception at the end of the last traceback in a text; empty: there is none."""
    lines = text.splitlines()
    return "\n".join(lines[_last_error(lines)])


def last_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return the last lines of an output, at most `most`.

    If the output has a traceback, they include the exception at its end. Warnings after it are then left out, and the
    oldest of the other lines after it as well if there are too many.
    """
    error = _last_error(lines)
    if not lines[error]:
        return list(lines[-most:])
    rest = _without_warnings(lines[error.stop :])
    room = most - (error.stop - error.start)
    if len(rest) <= room:
        return [*lines[: error.stop], *rest][-most:]
    return [*lines[error], *rest[len(rest) - room :]]


def _last_error(lines: Sequence[str]) -> slice:
    """Return the range of lines of the exception at the end of the last traceback; empty: there is none."""
    begin = next((i for i in reversed(range(len(lines))) if lines[i].startswith(_TRACEBACK)), len(lines))
    for i in range(begin + 1, len(lines)):
        if lines[i] and not lines[i][0].isspace():
            return slice(i, i + 1 + len(_continued(lines[i + 1 :])))
    return slice(0, 0)


def _without_warnings(lines: Sequence[str]) -> list[str]:
    """Return the lines without warnings and without the lines of code that Python quotes beneath a warning."""
    kept, warned = [], False
    for line in lines:
        warned = bool(_WARNING.search(line)) or (warned and line[:1].isspace())
        if not warned:
            kept.append(line)
    return kept


def _lines(log: Path) -> list[str]:
    try:
        return log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _cut(said: Sequence[str]) -> str:
    return "\n".join("\n".join(said[-3:]).splitlines()[:MOST_LINES])


def _continued(lines: Sequence[str]) -> list[str]:
    """Return the lines that continue an error's message: up to three indented lines that are not of a traceback."""
    found: list[str] = []
    for line in lines[:3]:
        if not line.startswith("  ") or line.lstrip().startswith(("File ", "^")):
            break
        found.append(line.rstrip())
    return found
