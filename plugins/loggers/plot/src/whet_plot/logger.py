"""The logger: draws the metrics of the run folder when the run ends."""

import os
from collections.abc import Mapping

from whet.interfaces.logger import RunInfo
from whet_plot.config import PlotConfig
from whet_plot.series import panels, read_rows


class PlotLogger:
    """Draws the whole run, also the steps before it was resumed."""

    def __init__(self, config: PlotConfig, run: RunInfo) -> None:
        self._config, self._run = config, run
        self._closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing: the run folder has the metrics."""

    def status(self, text: str) -> None:
        """Do nothing."""

    def rewind(self, step: int) -> None:
        """Do nothing: the run folder has dropped the later steps."""

    def close(self, failed: bool) -> None:
        """Draw the image, also for a run that failed. If no chosen metric exists, no image is written."""
        if self._closed:
            return
        self._closed = True
        found = panels(read_rows(self._run.folder / "metrics.jsonl"), self._config.panels)
        if not found:
            return
        from whet_plot.drawing import draw  # importing matplotlib is slow, so only if needed

        title = f"{self._run.name} (failed)" if failed else self._run.name
        draw(found, title, self._run.folder / os.path.expanduser(self._config.file))
