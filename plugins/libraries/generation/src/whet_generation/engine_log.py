"""Why an engine ended: the errors in its log, and in the logs of the processes that it started."""

import re
from collections.abc import Sequence
from pathlib import Path

from whet.runtime.last_words import continued

_ERROR = re.compile(r"^(?:\[\w+\] )?(?:\(\w+[^)]*\) )?((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b.*)$")
_ELSEWHERE = ("root cause", "initialization failed", "died during initialization", "keyboardinterrupt", "systemexit")
"""Words of errors that only report that another error happened."""
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
            found.append("\n".join([match[1], *continued(lines[number + 1 :])]))
    return _cut(list(dict.fromkeys(found)))


def points_elsewhere(error: str) -> bool:
    """Return whether an error only reports that another error happened, e.g. that the other end of a pipe is closed."""
    return error == "EOFError" or any(words in error.lower() for words in _ELSEWHERE)


def _lines(log: Path) -> list[str]:
    try:
        return log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _cut(said: Sequence[str]) -> str:
    return "\n".join("\n".join(said[-3:]).splitlines()[:MOST_LINES])
