"""Curricula for environments that have a difficulty: by pass rate or by step; see `whet.interfaces.environment`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from attrs import field, frozen

from whet.config.bounds import GROUP, STEPS, above, below, between
from whet.data.records import Episode, Group
from whet.errors import CheckpointError


class Curriculum(Protocol):
    """The methods of an adaptive environment that decide the difficulty, and its state."""

    def difficulty(self) -> float:
        """Return the present difficulty."""

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn from the groups that a step consumed."""

    def state(self) -> dict[str, Any]:
        """Return the state as builtins."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""


def _above_down(instance: "CurriculumConfig", attribute: Any, value: float) -> None:
    if value <= instance.down:
        raise ValueError(f"is {value:g}, wanted more than down, which is {instance.down:g}")


@frozen
class CurriculumConfig:
    """How the difficulty of training tasks rises. Evaluations always have the full difficulty."""

    easiest: int = field(default=1, validator=between(1, GROUP))
    """Difficulty when training begins."""
    by: Literal["pass-rate", "step"] = "pass-rate"
    """`pass-rate`: the difficulty rises by one whenever most of the recent episodes pass. `step`: it rises evenly, and
    reaches its maximum after `steps` steps."""
    down: float = field(default=0.0, validator=below(0, 1))
    """By pass rate: the difficulty falls by one at this rate and below."""
    up: float = field(default=0.8, validator=[above(0, 1), _above_down])
    """By pass rate: the difficulty rises by one at this rate and above."""
    window: int = field(default=32, validator=between(1, GROUP))
    """By pass rate: number of groups at the present difficulty over which the rate is taken."""
    steps: int = field(default=100, validator=between(1, STEPS))
    """By step: number of steps until the full difficulty."""

    def build(self, hardest: float, passes: Callable[[Episode], bool]) -> Curriculum:
        """Return the curriculum from `easiest` to `hardest`. `passes` decides by pass rate."""
        if self.by == "step":
            return StepCurriculum(self.easiest, hardest, self.steps)
        return PassRateCurriculum(self.easiest, hardest, up=self.up, down=self.down, window=self.window, passes=passes)


class StepCurriculum:
    """Raises the difficulty from `lowest` to `highest` in whole numbers, each for the same number of steps.

    After `steps` steps the difficulty is `highest`. A step is a call of `observe`.
    """

    def __init__(self, lowest: float, highest: float, steps: int) -> None:
        """Begin at `lowest`. Raises `ValueError` for bounds that cannot hold."""
        if lowest > highest or steps < 1:
            raise ValueError(
                f"StepCurriculum: lowest is {lowest}, highest is {highest} and steps is {steps}, wanted "
                "lowest <= highest, and at least 1 step"
            )
        self._lowest, self._highest, self._steps, self._done = lowest, highest, steps, 0

    def difficulty(self) -> float:
        """Return the present difficulty."""
        return self._lowest + (self._highest - self._lowest) * min(self._done, self._steps) // self._steps

    def observe(self, groups: Sequence[Group]) -> None:
        """Count a step."""
        self._done += 1

    def state(self) -> dict[str, Any]:
        """Return the number of steps so far."""
        return {"steps": self._done}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Raises `CheckpointError` for what `state` did not return."""
        if not isinstance(done := state.get("steps"), int):
            words = "wanted `steps`; it is of another curriculum, so start a new run"
            raise CheckpointError(f"StepCurriculum: the saved state is {dict(state)!r:.120}, {words}")
        self._done = done


class PassRateCurriculum:
    """Raises the difficulty when most of the recent episodes pass, and lowers it when few pass.

    After `window` groups at the present difficulty, the mean pass rate of the last `window` groups decides: from `up`
    on the difficulty rises by `step`, down from `down` it falls by `step`. Then the count begins again. Groups that
    were played at another difficulty do not count.
    """

    def __init__(
        self,
        lowest: float,
        highest: float,
        *,
        step: float = 1.0,
        up: float = 0.8,
        down: float = 0.0,
        window: int = 32,
        passes: Callable[[Episode], bool] = lambda episode: episode.reward >= 1.0,
    ) -> None:
        """Begin at `lowest`. Raises `ValueError` for bounds that cannot hold."""
        for holds, found, wanted in (
            (lowest <= highest, f"lowest is {lowest} and highest is {highest}", "lowest <= highest"),
            (0 <= down < up <= 1, f"down is {down} and up is {up}", "0 <= down < up <= 1"),
            (window >= 1, f"window is {window}", "at least 1 group"),
            (step > 0, f"step is {step}", "a number above 0"),
        ):
            if not holds:
                raise ValueError(f"PassRateCurriculum: {found}, wanted {wanted}")
        self._lowest, self._highest, self._step = lowest, highest, step
        self._up, self._down, self._window, self._passes = up, down, window, passes
        self._difficulty, self._rates = lowest, list[float]()

    def difficulty(self) -> float:
        """Return the present difficulty."""
        return self._difficulty

    def observe(self, groups: Sequence[Group]) -> None:
        """Count the pass rates of groups, and change the difficulty if they decide so."""
        for group in groups:
            if group.episodes[0].difficulty != self._difficulty:
                continue
            passed = [self._passes(episode) for episode in group.episodes]
            self._rates = [*self._rates, sum(passed) / len(passed)][-self._window :]
            if len(self._rates) == self._window:
                self._decide(sum(self._rates) / self._window)

    def _decide(self, rate: float) -> None:
        step = self._step if rate >= self._up else -self._step if rate <= self._down else 0.0
        difficulty = min(max(self._difficulty + step, self._lowest), self._highest)
        if difficulty != self._difficulty:
            self._difficulty, self._rates = difficulty, []

    def state(self) -> dict[str, Any]:
        """Return the difficulty, and the pass rates that count so far."""
        return {"difficulty": self._difficulty, "rates": list(self._rates)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Raises `CheckpointError` for what `state` did not return."""
        try:
            self._difficulty, self._rates = float(state["difficulty"]), [float(rate) for rate in state["rates"]]
        except (KeyError, TypeError, ValueError) as error:
            words = "wanted `difficulty` and `rates`; it is of another environment, so start a new run"
            raise CheckpointError(f"PassRateCurriculum: the saved state is {state!r:.120}, {words}") from error
