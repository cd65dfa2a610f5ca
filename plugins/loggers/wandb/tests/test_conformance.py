from pathlib import Path

import pytest

from whet.interfaces.logger import RunInfo
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.logger import LoggerContract, Rows
from whet_wandb.config import WandbConfig

pytest.importorskip("wandb", "0.31", reason="wandb >= 0.31 is not installed")

from whet_wandb import offline
from whet_wandb.logger import WandbLogger


class TestPlugin(ComponentContract):
    hooks = "whet_wandb.hooks"


class TestWandb(LoggerContract):
    def make(self, run: RunInfo) -> WandbLogger:
        self.logger = WandbLogger(WandbConfig(mode="offline", rollouts_every=1), run)
        return self.logger

    def read(self, folder: Path) -> Rows | None:
        if not self.logger.closed:
            return None  # W&B's process writes when it likes; a resume sends what is missing
        (run_id,) = {file.stem.removeprefix("run-") for file in folder.glob("wandb/offline-run-*/*.wandb")}
        files = offline.files(folder, run_id)
        rows = {row["step"]: row for file in files for row in offline.history(file) if "attempt" in row}
        return sorted((step, row) for step, row in rows.items())
