"""Write the page of all attempts to get out of a sandbox that the tests make, from the tests."""

import importlib.util
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

HEAD = """\
# Attempts to get out of a sandbox

The tests of [`whet-sandbox`](../../plugins/libraries/sandbox/README.md) make each of these {count} attempts, in a
sandbox of the provider `namespaces`, as root and as an ordinary user. An attempt counts as stopped only if it ended in
the way of its wall, so one that fails by a slip of its own fails the test. The code of each is in
[`escapes.py`](../../plugins/libraries/sandbox/tests/escapes.py);
[Security](../explanation/security.md#programs-in-sandboxes) explains the walls. `limit` is the limit that the attempt
runs into."""
TITLES = {
    "_FILES": "Files",
    "_ENVIRONMENT": "Environment and descriptors",
    "_NETWORK": "Network",
    "_PROCESSES": "Processes and the kernel",
    "_EXHAUSTION": "Exhaustion",
    "_ROUNDABOUT": "Ways round",
}


def page(root: Path) -> str:
    """Return the page."""
    module = _module(root / "plugins/libraries/sandbox/tests/escapes.py")
    parts = [HEAD.format(count=len(module.ESCAPES))]
    for name, title in TITLES.items():
        rows = sorted(((one[0], one[1]) for one in getattr(module, name)), key=lambda row: row[1])
        lines = ["| attempt | what stops it |", "| --- | --- |"]
        for wall, attempts in groupby(rows, key=lambda row: row[1]):
            lines += [f"| {_cell(attempt)} | {_cell(wall)} |" for attempt, _ in attempts]
        parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("escapes_of_the_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
