"""The metrics that the summary needs, from all steps. A resumed run includes the steps before it was resumed."""

import math
from collections.abc import Mapping, Sequence

from attrs import Factory, define, frozen

VALIDATION = "validation/"
JUDGED = ("evaluation/", VALIDATION)
"""Prefixes of the metrics whose values are all kept, to find the best."""
TIMES = "seconds/"
STARTUP = "seconds/startup"
"""The time until the first step. After a dot: its parts."""
BOUNDS = ("/ci_low", "/ci_high")
"""Suffixes of the ends of a 95 % interval. They are shown beside the metric."""
COUNTS = ("/dropped", "/undecided")
"""Failed episodes of an evaluation, and responses that graders could not decide about. Shown if not 0."""


@frozen
class Change:
    """The change of one metric over the run."""

    name: str
    first: float
    last: float
    best: float | None = None
    """None: neither direction is better."""
    best_step: int = 0


@define
class History:
    """The metrics of a run that its summary needs."""

    first: dict[str, float] = Factory(dict)
    last: dict[str, float] = Factory(dict)
    judged: dict[str, list[tuple[int, float]]] = Factory(dict)
    seconds: dict[str, float] = Factory(dict)
    """Total seconds over all steps for each ROLE.PHASE, and for `step`. Step 0 is not counted."""
    step: int = 0

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self.step = max(self.step, step)
        for name, value in metrics.items():
            if name.startswith(STARTUP):
                continue
            if name.startswith(TIMES):
                phase = name.removeprefix(TIMES)
                self.seconds[phase] = self.seconds.get(phase, 0.0) + (value if step else 0.0)
                continue
            self.first.setdefault(name, value)
            self.last[name] = value
            if name.startswith(JUDGED):
                self.judged.setdefault(name, []).append((step, value))

    def judgements(self) -> list[Change]:
        """Return first, last and best value of evaluation and validation metrics, rewards first."""
        names = sorted(filter(self._matters, self.judged), key=lambda name: (_rank(name), name))
        return [self._judge(name) for name in names]

    def _matters(self, name: str) -> bool:
        """Return whether a metric gets a row. Interval ends, and counts that are always 0, get none."""
        return not name.endswith(BOUNDS) and (not name.endswith(COUNTS) or any(v for _, v in self.judged[name]))

    def intervals(self, name: str) -> dict[int, tuple[float, ...]]:
        """Return the 95 % interval of a metric at each step that has one."""
        low, high = (dict(self.judged.get(name + end, [])) for end in BOUNDS)
        return {step: tuple(possible(name, [low[step], high[step]])) for step in low if step in high}

    def _judge(self, name: str) -> Change:
        points = self.judged[name]
        first, last = points[0][1], points[-1][1]
        if name.endswith(("/response_length", *COUNTS)):
            return Change(name, first, last)
        pick = min if name.endswith(("loss", "perplexity")) else max
        fine = [point for point in points if math.isfinite(point[1])]
        if not fine:
            return Change(name, first, last)
        step, value = pick(fine, key=lambda point: point[1])
        return Change(name, first, last, value, step)


def _rank(name: str) -> int:
    return 0 if name.endswith("/reward") else 2 if name.endswith("/response_length") else 1


def possible(name: str, bounds: Sequence[float]) -> list[float]:
    """Return an interval without impossible values: a length is at least 0."""
    return [max(0.0, bound) for bound in bounds] if name.endswith("length") else list(bounds)
