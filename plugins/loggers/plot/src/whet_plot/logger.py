"""The logger: it waits for the end of the run and draws what the run folder holds."""

from collections.abc import Mapping

from whet.interfaces.logger import RunInfo
from whet_plot.config import PlotConfig
from whet_plot.series import panels, read_rows


class PlotLogger:
    """Draws the whole run, with the steps before it was resumed."""

    def __init__(self, config: PlotConfig, run: RunInfo) -> None:
        self._config, self._run = config, run
        self._closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing: the run folder keeps the numbers."""

    def status(self, text: str) -> None:
        """Ignored."""

    def rewind(self, step: int) -> None:
        """Nothing: the run folder has forgotten them."""

    def close(self, failed: bool) -> None:
        """Draw; also of a run that failed. A run without any chosen metric gets no image."""
        if self._closed:
            return
        self._closed = True
        found = panels(read_rows(self._run.folder / "metrics.jsonl"), self._config.panels)
        if not found:
            return
        from whet_plot.drawing import draw  # matplotlib takes long to import: only when it is needed

        title = f"{self._run.name} (failed)" if failed else self._run.name
        draw(found, title, self._run.folder / self._config.file)
