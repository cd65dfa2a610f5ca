"""Hooks that end a run when a metric has not improved for some steps."""

from attrs import field, frozen

import whet


@frozen
class PlateauConfig:
    """Ends the run when a metric has stopped to improve. It is saved, and can be continued."""

    metric: str = "reward/mean"
    """Name of the metric; larger is better."""
    patience: int = field(default=20, validator=whet.between(1, 1_000_000))
    """Steps without a new best value after which the run ends."""


class Plateau:
    def __init__(self, config, run):
        self._config, self._best, self._since = config, float("-inf"), 0
        self._stop = lambda: None

    @whet.hookimpl(wrapper=True)
    def whet_run(self, parts):
        self._stop = parts.steps.stop
        return (yield)

    @whet.hookimpl
    def whet_step_finished(self, step, metrics):
        value = metrics.get(self._config.metric)
        if value is None:
            return
        self._since = 0 if value > self._best else self._since + 1
        self._best = max(value, self._best)
        if self._since == self._config.patience:
            self._stop()


@whet.hookimpl
def whet_hooks():
    return [whet.Component("plateau", PlateauConfig, ":Plateau")]
