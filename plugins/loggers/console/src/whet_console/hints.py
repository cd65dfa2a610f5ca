"""Print a hint, once, if several steps in a row give no learning signal."""

from collections.abc import Mapping

from attrs import define, field

STEPS = 5
"""Number of such steps in a row before the hint."""
ZERO = (
    "all rewards were 0 in {} steps in a row, so nothing is learned: look at the responses in rollouts/; the tasks may "
    "be too hard, responses too short (rollout.max_tokens), or the reward too strict"
)
EQUAL = (
    "in {} steps in a row the rewards within each group were equal, so there is nothing to compare and the loss is 0: "
    "more samples of a task, or tasks that are neither too easy nor too hard, help"
)
NOTHING = (
    "in {} steps in a row no token was trained on (skipped_steps): masks or corrections leave none, or every response "
    "was sampled with settings of its own, e.g. with another temperature than the run's"
)
UNDECIDED = (
    "step {}: graders could not decide about {:g} responses within their limits; these count as wrong "
    "(grader/undecided), and the key undecided of their rows in rollouts/ says why"
)


@define
class Hints:
    """Watches the rewards of the steps and chooses hints."""

    _undecided: bool = field(default=False, init=False)
    _zero: int = field(default=0, init=False)
    _equal: int = field(default=0, init=False)
    _nothing: int = field(default=0, init=False)

    def after(self, metrics: Mapping[str, float]) -> str:
        """Record a step's metrics. Returns a hint if `STEPS` steps in a row trained on nothing, else "".

        Rewards of both signs may have the mean 0. Then they are not all 0, so the deviation is checked, too.
        """
        if "reward/mean" not in metrics:
            return ""
        equal = metrics.get("reward/std") == 0
        zero = equal and metrics["reward/mean"] == 0
        self._zero, self._equal = (self._zero + 1 if zero else 0), (self._equal + 1 if equal else 0)
        skipped = bool(metrics.get("skipped_steps")) and metrics.get("grad_norm") == 0 and not equal
        self._nothing = self._nothing + 1 if skipped else 0
        if self._zero == STEPS:
            return ZERO.format(STEPS)
        if self._nothing == STEPS:
            return NOTHING.format(STEPS)
        return EQUAL.format(STEPS) if self._equal == STEPS and not zero else ""

    def undecided(self, step: int, metrics: Mapping[str, float]) -> str:
        """Record a step's metrics. Returns a hint at the first step in which graders could not decide, else ""."""
        count = metrics.get("grader/undecided", 0.0)
        if not count or self._undecided:
            return ""
        self._undecided = True
        return UNDECIDED.format(step, count)
