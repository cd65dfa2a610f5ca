"""The speed of a run: seconds and tokens of the steps of a row, and the remaining time."""

import time
from collections import deque
from collections.abc import Callable, Mapping

from attrs import define, field

STEP, TOKENS = "seconds/step", "tokens"
SECONDS_PER_STEP, TOKENS_PER_SECOND = "s/step", "tokens/s"
"""Columns that are not metrics. They are computed from `seconds/step` and `tokens`."""
REMEMBERED = 100
"""Number of steps from which the remaining time is estimated, with saving and evaluation."""


@define
class Pace:
    """Measures the steps since the run was started or resumed."""

    _clock: Callable[[], float] = time.monotonic
    _ends: deque[tuple[int, float]] = field(factory=lambda: deque(maxlen=REMEMBERED + 1), init=False)
    """The number of each step, and the time at which it ended."""
    _seconds: list[float] = field(factory=list, init=False)
    """Seconds of each step since the last row."""
    _tokens: list[float] = field(factory=list, init=False)

    def after(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step. Step 0 is not a training step and is ignored."""
        if step > 0 and STEP in metrics:
            self._ends.append((step, self._clock()))
            self._seconds.append(metrics[STEP])
            if TOKENS in metrics:
                self._tokens.append(metrics[TOKENS])

    def row(self) -> dict[str, float]:
        """Return the columns of a row, as means over the steps since the previous row."""
        seconds, tokens = self._seconds, self._tokens
        found = {}
        if tokens and len(tokens) == len(seconds) and sum(seconds) > 0:
            found[TOKENS_PER_SECOND] = sum(tokens) / sum(seconds)
        if seconds:
            found[SECONDS_PER_STEP] = sum(seconds) / len(seconds)
        return found

    def left(self, steps: int) -> float | None:
        """Return the estimated seconds until step `steps` ends. None: no estimate yet, or no step left."""
        if not self._ends or self._ends[-1][0] >= steps:
            return None
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        each = (ended - began) / (last - first) if last > first else self._seconds[-1] if self._seconds else None
        return None if each is None else each * (steps - last)

    def begin_row(self) -> None:
        """Forget the steps of the last row."""
        self._seconds.clear()
        self._tokens.clear()

    def rewind(self) -> None:
        """Forget all steps, because some steps are run again."""
        self.begin_row()
        self._ends.clear()


def clock(seconds: float) -> str:
    """Return seconds as text: hours, minutes and seconds."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
