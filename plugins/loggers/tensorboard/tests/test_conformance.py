from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from whet.interfaces.logger import RunInfo
from whet_tensorboard.config import TensorboardConfig
from whet_tensorboard.logger import TensorboardLogger
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.logger import LoggerContract, Rows


class TestPlugin(ComponentContract):
    hooks = "whet_tensorboard.hooks"


class TestTensorboard(LoggerContract):
    def make(self, run: RunInfo) -> TensorboardLogger:
        return TensorboardLogger(TensorboardConfig(), run)

    def read(self, folder: Path) -> Rows:
        events = EventAccumulator(str(folder / TensorboardConfig().folder), size_guidance={"scalars": 0}).Reload()
        rows: dict[int, dict[str, float]] = {}
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                assert name not in rows.setdefault(event.step, {}), f"{name} has step {event.step} twice"
                rows[event.step][name] = event.value
        return sorted(rows.items())
