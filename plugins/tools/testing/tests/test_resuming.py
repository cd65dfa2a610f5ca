"""The kit's rule of states catches what silently differs after a resume."""

from typing import Any

import pytest

from whet_testing.resuming import assert_resumes


class Average:
    """A moving average whose state may be wrong."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong, self.average, self.count = wrong, 0.0, 0

    def __call__(self, value: float) -> float:
        self.count += 1
        self.average += (value - self.average) / self.count
        return value - self.average

    def state(self) -> dict[str, Any]:
        average = round(self.average, 6) if self.wrong == "rounded" else self.average
        return {"average": average, **({} if self.wrong == "forgets" else {"count": self.count})}

    def load(self, state: dict[str, Any]) -> None:
        if self.wrong != "ignores":
            self.average, self.count = state["average"], state.get("count", 0)


VALUES = [0.1, 1.7, -2.3, 0.9, 3.1, 0.4]


def test_a_whole_state_resumes() -> None:
    assert_resumes(Average, lambda one, value: one(value), VALUES)


@pytest.mark.parametrize("wrong", ["rounded", "forgets", "ignores"])
def test_a_state_that_lacks_something_is_refused(wrong: str) -> None:
    with pytest.raises(AssertionError, match="after a resume at item 1, item 1 gives"):
        assert_resumes(lambda: Average(wrong), lambda one, value: one(value), [1 / 3, *VALUES])
