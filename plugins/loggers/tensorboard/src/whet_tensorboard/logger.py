"""The logger: the events of a run, and the times at which they are written."""

import os
from collections.abc import Mapping

from whet.config.document import to_text
from whet.interfaces.logger import Event, RunInfo
from whet_tensorboard.config import TensorboardConfig
from whet_tensorboard.events import EventFile, histograms, scalars, session_end, session_start, text


class TensorboardLogger:
    """Writes one event file each time the run is started or resumed."""

    def __init__(self, config: TensorboardConfig, run: RunInfo) -> None:
        self._events = EventFile(run.folder / os.path.expanduser(config.folder))
        # A resumed run keeps step 0. A fresh run drops step 0 and all other steps of an older run.
        self._events.restart(run.resumed_from + 1 if run.resumed_from else 0)
        listing = to_text(dict(run.config)).replace("```", "'''")
        self._events.write(run.resumed_from, text("config", f"```yaml\n{listing}```"))
        self._events.write(run.resumed_from, session_start(run.name, values(run.config)))
        self._events.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, and flush the file."""
        if metrics:
            self._events.write(step, scalars(metrics))
            self._events.flush()

    def event(self, event: Event) -> None:
        """Write the histograms of a step."""
        if event.kind == "histograms":
            self._events.write(event.step or 0, histograms(event.rows))
            self._events.flush()

    def status(self, text: str) -> None:
        """Do nothing."""

    def rewind(self, step: int) -> None:
        """Write an event that makes readers drop later steps."""
        self._events.restart(step + 1)
        self._events.flush()

    def close(self, failed: bool) -> None:
        """Write whether the run failed, and close the file."""
        if not self._events.closed:
            self._events.write(0, session_end(failed))
            self._events.close()


def values(config: object, path: str = "") -> dict[str, bool | float | str]:
    """Return every value of a config by its dotted path. Null and empty values are left out."""
    if isinstance(config, Mapping):
        items = [(str(key), item) for key, item in config.items()]
    elif isinstance(config, list | tuple):
        items = [(str(index), item) for index, item in enumerate(config)]
    elif config is None or not path:
        return {}
    else:
        return {path: config if isinstance(config, bool | int | float) else str(config)}
    return {name: value for key, item in items for name, value in values(item, f"{path}.{key}".lstrip(".")).items()}
