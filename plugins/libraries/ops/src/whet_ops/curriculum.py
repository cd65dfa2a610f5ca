"""A curriculum that follows pass rates, for environments that have a difficulty; see `whet.interfaces.environment`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.data.records import Episode, Group
from whet.errors import CheckpointError


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
