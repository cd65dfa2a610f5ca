import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from whet.errors import ConfigError, WhetError
from whet.interfaces.logger import RunInfo
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.logger import LoggerContract, Rows
from whet_wandb.config import WandbConfig

pytest.importorskip("wandb", "0.31", reason="wandb >= 0.31 is not installed")

import wandb

from whet_wandb import offline
from whet_wandb.logger import WandbLogger, _mode


@pytest.fixture(scope="module", autouse=True)
def no_service_outlives_these_tests() -> Iterator[None]:
    """W&B leaves its service, and the address in the environment, to every program that this process starts."""
    yield
    wandb.teardown()


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Set environment variables of W&B; W&B reads them once in a process."""

    def write(**values: str) -> None:
        for name in [name for name in os.environ if name.startswith("WANDB_") and name != "WANDB_DATA_DIR"]:
            monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    wandb.teardown()
    yield write
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


@pytest.mark.parametrize("bins", [1, 512, 513, 1024, 1500])
def test_a_histogram_has_no_more_bins_than_wandb_takes(bins: int) -> None:
    counts, bounds = [*range(bins)], [*map(float, range(bins + 1))]
    made = WandbLogger.__new__(WandbLogger).histogram(counts, bounds)  # no run is needed
    assert len(made.histogram) == (bins if bins <= 512 else -(-bins // -(-bins // 512)))
    assert (made.bins[0], made.bins[-1]) == (0.0, bins)
    ends = [*map(int, made.bins)]
    assert made.histogram == [sum(counts[i:j]) for i, j in pairwise(ends)]


def test_where_wandb_cannot_be_reached_the_error_names_the_mode_that_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**given: object) -> None:
        raise wandb.errors.CommError("Run initialization has timed out after 90.0 sec")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(WhetError, match=r"timed out .*; where W&B cannot be reached, set .* `mode: offline`"):
        WandbLogger(WandbConfig(mode="online"), RunInfo(tmp_path, "it"))


def test_the_end_of_a_run_waits_for_wandb_with_a_limit(tmp_path: Path) -> None:
    logger = WandbLogger(WandbConfig(mode="offline", finish_seconds=7), RunInfo(tmp_path, "it"))
    assert logger._run.settings.finish_timeout == 7
    logger.close(failed=False)


OF_WANDB = {
    "WANDB_MODE": "offline",
    "WANDB_PROJECT": "theirs",
    "WANDB_NAME": "first",
    "WANDB_ENTITY": "they",
    "WANDB_RUN_GROUP": "many",
    "WANDB_TAGS": "a,b",
}


def test_the_environment_counts_where_the_config_says_nothing(tmp_path: Path, variables: Callable[..., None]) -> None:
    variables(**OF_WANDB)
    logger = WandbLogger(WandbConfig(), RunInfo(tmp_path, "it"))
    logger.close(failed=False)
    ours = logger._run.settings
    assert (ours.mode, ours.project, ours.run_name) == ("offline", "theirs", "first")
    assert (ours.entity, ours.run_group, ours.run_tags) == ("they", "many", ("a", "b"))
    assert list(tmp_path.glob("wandb/offline-run-*"))


def test_the_config_counts_more_than_the_environment(tmp_path: Path, variables: Callable[..., None]) -> None:
    variables(**OF_WANDB | {"WANDB_MODE": "disabled"})
    config = WandbConfig(mode="offline", project="ours", name="second", entity="we", group="few", tags=["c"])
    logger = WandbLogger(config, RunInfo(tmp_path, "it"))
    logger.close(failed=False)
    ours = logger._run.settings
    assert (ours.mode, ours.project, ours.run_name) == ("offline", "ours", "second")
    assert (ours.entity, ours.run_group, ours.run_tags) == ("we", "few", ("c",))


def test_without_either_the_project_is_whet_and_the_name_that_of_the_run(
    tmp_path: Path, variables: Callable[..., None]
) -> None:
    variables(WANDB_CONFIG_DIR=str(tmp_path / "none"))
    assert _mode(wandb.setup().settings.mode) == "online"
    logger = WandbLogger(WandbConfig(mode="offline"), RunInfo(tmp_path, "it"))
    logger.close(failed=False)
    assert (logger._run.settings.project, logger._run.settings.run_name) == ("whet", "it")


def test_a_disabled_run_writes_nothing_of_wandb(tmp_path: Path, variables: Callable[..., None]) -> None:
    variables(WANDB_MODE="disabled")
    logger = WandbLogger(WandbConfig(), RunInfo(tmp_path, "it"))
    logger.log(1, {"reward": 0.5})
    logger.close(failed=False)
    assert not list(tmp_path.glob("wandb/*run-*"))


def test_a_mode_that_is_not_of_this_logger_is_refused(tmp_path: Path, variables: Callable[..., None]) -> None:
    variables(WANDB_MODE="shared")
    with pytest.raises(ConfigError, match="WANDB_MODE is 'shared', wanted `online`, `offline` or `disabled`"):
        WandbLogger(WandbConfig(), RunInfo(tmp_path, "it"))
