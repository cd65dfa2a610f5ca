"""The rule of states: a component that resumes from its saved state does what one does that never stopped."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from whet.interfaces.state import check_ran, states


def assert_resumes(make: Callable[[], Any], drive: Callable[[Any, Any], Any], items: Iterable[Any]) -> None:
    """Check that a component gives the same results for the items with and without an interruption at any item.

    `drive(component, item)` returns a result to compare: a number or an array.
    """
    items, straight = list(items), make()
    expected = [np.array(drive(straight, item)) for item in items]
    for cut in sorted({1, len(items) // 2, len(items) - 1}):
        before, after = make(), make()
        found = [np.array(drive(before, item)) for item in items[:cut]]
        check_ran(after.load(json.loads(json.dumps(states({"it": before})["it"]))), "`load`")
        found += [np.array(drive(after, item)) for item in items[cut:]]
        wrong = [
            i for i, (one, other) in enumerate(zip(found, expected, strict=True)) if not np.array_equal(one, other)
        ]
        assert not wrong, (
            f"after a resume at item {cut}, item {wrong[0]} gives {found[wrong[0]]!r:.200} and without one "
            f"{expected[wrong[0]]!r:.200}: state() must return all that changes, and load() must restore it"
        )
