"""Why an engine ended: the errors in what its processes wrote."""

import re
from pathlib import Path

_ERROR = re.compile(r"^(?:\[\w+\] )?(?:\(\w+[^)]*\) )?((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b.*)$")
_ELSEWHERE = ("root cause", "initialization failed", "keyboardinterrupt", "systemexit")
"""Of errors that only say that there was another."""
MOST_LINES = 12


def causes(log: Path) -> str:
    """Quote the errors of an engine's log, first causes first; where there are none, its last lines. May be empty."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    errors = []
    for number, line in enumerate(lines):
        match = _ERROR.match(line)
        if match and not any(words in line.lower() for words in _ELSEWHERE):
            errors.append("\n".join([match[1], *_continued(lines[number + 1 :])]))
    said = list(dict.fromkeys(errors))[-3:] or [line for line in lines if line.strip()][-3:]
    return "\n".join("\n".join(said).splitlines()[:MOST_LINES])


def _continued(lines: list[str]) -> list[str]:
    """Give the lines that go on with an error's message: they are indented, and no traceback begins there."""
    found: list[str] = []
    for line in lines[:3]:
        if not line.startswith("  ") or line.lstrip().startswith(("File ", "^")):
            break
        found.append(line.rstrip())
    return found
