"""A filter with a memory: a task that was solved by every sample a few times in a row is not trained on again."""

from attrs import field, frozen

import whet


@frozen
class RetiredTasksConfig:
    """Leaves out tasks that the model has learned."""

    solved_at: float = 1.0
    """A sample with at least this reward has solved its task."""
    times: int = field(default=2, validator=whet.between(1, 1000))
    """A task is left out after it was solved this often in a row."""


class RetiredTasks:
    def __init__(self, config):
        self._config, self._solved = config, {}

    def __call__(self, group):
        task = f"{group.environment}/{group.task}"
        before = self._solved.get(task, 0)
        if before < self._config.times:
            solved = group.rewards.min() >= self._config.solved_at
            self._solved[task] = before + 1 if solved else 0
        return before < self._config.times

    def state(self):
        return {"solved": self._solved}

    def load(self, state):
        self._solved = dict(state["solved"])


@whet.hookimpl
def whet_filters():
    return [whet.Component("retired-tasks", RetiredTasksConfig, ":RetiredTasks")]
