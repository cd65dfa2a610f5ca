"""Finds an interpreter that has verifiers: `WHET_VERIFIERS_PYTHON`, or the one that runs the tests."""

import importlib.util
import os
from pathlib import Path

TASKSETS = Path(__file__).parent / "tasksets"


def interpreter() -> str | None:
    """Return the value of the field `python`. None: no interpreter with verifiers is known."""
    if named := os.environ.get("WHET_VERIFIERS_PYTHON"):
        return named
    found = importlib.util.find_spec("verifiers")
    return "" if found and importlib.util.find_spec("verifiers.v1") else None


WHY_NOT = "verifiers is not installed: make an environment with it, and name its interpreter by WHET_VERIFIERS_PYTHON"
