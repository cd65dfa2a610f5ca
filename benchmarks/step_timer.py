"""The clock of the peers' scripts: a callback of a `transformers` trainer."""

import time

from transformers import TrainerCallback


class StepTimer(TrainerCallback):
    """Wall seconds of each optimizer step, from one step's end to the next's."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.first = 0.0
        """When the first step ended, in seconds since the epoch."""

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        """Start the clock."""
        self._begin = time.perf_counter()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        """Record the time of a step."""
        now = time.perf_counter()
        self.seconds.append(now - self._begin)
        self.first = self.first or time.time()
        self._begin = now
