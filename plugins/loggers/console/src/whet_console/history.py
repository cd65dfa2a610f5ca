"""What the summary needs of the steps so far, and of a run that was resumed also of the steps before."""

from collections.abc import Mapping, Sequence

from attrs import Factory, define, frozen

VALIDATION = "validation/"
JUDGED = ("evaluation/", VALIDATION)
"""Metrics of which every value is kept, to name the best."""
TIMES = "seconds/"
STARTUP = "seconds/startup"
"""The time to the first step, and behind a dot its parts."""
BOUNDS = ("/ci_low", "/ci_high")
"""Ends of a 95 % interval, which stand beside its figure."""
COUNTS = ("/dropped", "/undecided")
"""Episodes of an evaluation that failed, and answers that graders could not decide about; shown where there are any."""


@frozen
class Change:
    """What became of one metric."""

    name: str
    first: float
    last: float
    best: float | None = None
    """None where neither direction is better."""
    best_step: int = 0


@define
class History:
    """The metrics of a run, as far as its summary needs them."""

    first: dict[str, float] = Factory(dict)
    last: dict[str, float] = Factory(dict)
    judged: dict[str, list[tuple[int, float]]] = Factory(dict)
    seconds: dict[str, float] = Factory(dict)
    """Total over all steps for each ROLE.PHASE, and for `step` as a whole; what came before the first is left out."""
    step: int = 0

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
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
        """Give first, last and best of evaluation and validation metrics, rewards first."""
        names = sorted(filter(self._matters, self.judged), key=lambda name: (_rank(name), name))
        return [self._judge(name) for name in names]

    def _matters(self, name: str) -> bool:
        """Say whether it deserves a row: intervals stand beside their figure, and dropping nothing is no news."""
        return not name.endswith(BOUNDS) and (not name.endswith(COUNTS) or any(v for _, v in self.judged[name]))

    def intervals(self, name: str) -> dict[int, tuple[float, ...]]:
        """Give the 95 % interval of a metric at each step that has one."""
        low, high = (dict(self.judged.get(name + end, [])) for end in BOUNDS)
        return {step: tuple(possible(name, [low[step], high[step]])) for step in low if step in high}

    def _judge(self, name: str) -> Change:
        points = self.judged[name]
        first, last = points[0][1], points[-1][1]
        if name.endswith(("/response_length", *COUNTS)):
            return Change(name, first, last)
        pick = min if name.endswith(("loss", "perplexity")) else max
        step, value = pick(points, key=lambda point: point[1])
        return Change(name, first, last, value, step)


def _rank(name: str) -> int:
    return 0 if name.endswith("/reward") else 2 if name.endswith("/response_length") else 1


def possible(name: str, bounds: Sequence[float]) -> list[float]:
    """Return an interval without what cannot be: no length is below 0."""
    return [max(0.0, bound) for bound in bounds] if name.endswith("length") else list(bounds)
