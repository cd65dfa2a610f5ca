from collections.abc import Iterator
from pathlib import Path

import pytest

from whet.interfaces.logger import RunInfo
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.logger import LoggerContract, Rows
from whet_wandb.config import WandbConfig

pytest.importorskip("wandb", "0.31", reason="wandb >= 0.31 is not installed")

import wandb

from whet_wandb import offline
from whet_wandb.logger import WandbLogger


@pytest.fixture(scope="module", autouse=True)
def no_service_outlives_these_tests() -> Iterator[None]:
    """W&B leaves its service, and the address in the environment, to every program that this process starts."""
    yield
    wandb.teardown()


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


def test_attempts_that_begin_in_one_second_are_all_found_in_order(tmp_path):
    names = [
        "run-20261124_053437-ab",
        "run-20261124_053436-ab-10",
        "run-20261124_053436-ab-2",
        "run-20261124_053436-ab",
    ]
    for name in [*names, "run-20261124_053436-xab"]:
        folder = tmp_path / "wandb" / f"offline-{name}"
        folder.mkdir(parents=True)
        (folder / f"run-{name.split('-')[2]}.wandb").touch()
    found = [file.parent.name.removeprefix("offline-") for file in offline.files(tmp_path, "ab")]
    assert found == names[::-1]


def test_the_end_of_a_run_waits_for_wandb_with_a_limit(tmp_path: Path) -> None:
    logger = WandbLogger(WandbConfig(mode="offline", finish_seconds=7), RunInfo(tmp_path, "it"))
    assert logger._run.settings.finish_timeout == 7
    logger.close(failed=False)
