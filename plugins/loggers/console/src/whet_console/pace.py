"""How fast the steps go: seconds and tokens of a row's steps, and the time that is left."""

import time
from collections import deque
from collections.abc import Callable, Mapping

from attrs import define, field

STEP, TOKENS = "seconds/step", "tokens"
SECONDS_PER_STEP, TOKENS_PER_SECOND = "s/step", "tokens/s"
"""Columns that no metric has: they are worked out from `seconds/step` and `tokens`."""
REMEMBERED = 100
"""Steps over which the time left is estimated, saving and evaluation included."""


@define
class Pace:
    """Watches the steps of this sitting."""

    _clock: Callable[[], float] = time.monotonic
    _ends: deque[tuple[int, float]] = field(factory=lambda: deque(maxlen=REMEMBERED + 1), init=False)
    """The number of each step, and when it was over."""
    _seconds: list[float] = field(factory=list, init=False)
    """Of each step since the last row."""
    _tokens: list[float] = field(factory=list, init=False)

    def after(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step; step 0 is none."""
        if step > 0 and STEP in metrics:
            self._ends.append((step, self._clock()))
            self._seconds.append(metrics[STEP])
            if TOKENS in metrics:
                self._tokens.append(metrics[TOKENS])

    def row(self) -> dict[str, float]:
        """Return the columns of a row, as means over the steps since the row before."""
        seconds, tokens = self._seconds, self._tokens
        found = {}
        if tokens and len(tokens) == len(seconds) and sum(seconds) > 0:
            found[TOKENS_PER_SECOND] = sum(tokens) / sum(seconds)
        if seconds:
            found[SECONDS_PER_STEP] = sum(seconds) / len(seconds)
        return found

    def left(self, steps: int) -> float | None:
        """Return the seconds until the last of `steps` steps is over; None where nothing is known or left."""
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
        """Forget all steps: some are taken again."""
        self.begin_row()
        self._ends.clear()


def clock(seconds: float) -> str:
    """Write seconds as hours, minutes and seconds."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
