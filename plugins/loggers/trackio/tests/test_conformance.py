import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from whet.interfaces.logger import RunInfo
from whet.run.run_folder import RunFolder
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.logger import LoggerContract, Rows
from whet_trackio.config import TrackioConfig

pytestmark = [
    pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed: it brings a web server"),
    pytest.mark.usefixtures("database"),
]


class TestPlugin(ComponentContract):
    hooks = "whet_trackio.hooks"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))  # read when trackio is imported


class TestTrackio(LoggerContract):
    def make(self, run: RunInfo) -> object:
        from whet_trackio.logger import TrackioLogger

        self.logger = TrackioLogger(TrackioConfig(rollouts_every=1), run)
        return self.logger

    def read(self, folder: Path) -> Rows | None:
        from trackio.sqlite_storage import SQLiteStorage

        if not self.logger.closed:
            return None  # Trackio's thread writes twice a second; a resume sends what is missing
        rows = SQLiteStorage.get_logs("whet", RunFolder(folder).read_json("trackio.json")["name"])
        return sorted({row["step"]: row for row in rows if "attempt" in row}.items())  # the last row of a step counts
