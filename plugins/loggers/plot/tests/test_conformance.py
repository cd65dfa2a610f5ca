import json
from collections.abc import Mapping

from whet.interfaces.logger import RunInfo
from whet_plot.config import PlotConfig
from whet_plot.logger import PlotLogger
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.logger import LoggerContract


class TestPlugin(ComponentContract):
    hooks = "whet_plot.hooks"


class FedPlot(PlotLogger):
    """A plot whose run folder gets the numbers first, as core writes them."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with (self._run.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "time": float(step), **metrics}) + "\n")
        super().log(step, metrics)


class TestPlot(LoggerContract):
    def make(self, run: RunInfo) -> PlotLogger:
        return FedPlot(PlotConfig(), run)
