"""Lets the tests run from a checkout in which this package is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
