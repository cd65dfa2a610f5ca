"""The TensorBoard logger, read back by TensorBoard's own readers."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.util.tensor_util import make_ndarray

import whet.interfaces.logger
from whet.interfaces.logger import RunInfo
from whet_tensorboard.config import TensorboardConfig
from whet_tensorboard.logger import TensorboardLogger, values

CONFIG = {"run": {"steps": 4, "export": True}, "algorithm": {"use": "grpo", "loss": {"clip_low": 0.2}}, "plugins": []}


def write(folder: Path, steps: Any, resumed_from: int = 0, failed: bool = False, offset: float = 0.0) -> None:
    logger = TensorboardLogger(TensorboardConfig(), RunInfo(folder, "it", CONFIG, 4, resumed_from))
    for step in steps:
        logger.log(step, {"loss": step + offset})
    logger.close(failed)


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard")).Reload()


def loss(folder: Path) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars("loss")]


def sessions(folder: Path) -> list[Any]:
    """Return what is said about sessions, in the order written."""
    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        reader = PyRecordReader_New(str(path))
        while True:
            try:
                reader.GetNext()
            except Exception:  # the end of the file
                break
            for value in Event.FromString(reader.record()).summary.value:
                if value.metadata.plugin_data.plugin_name == "hparams":
                    content = value.metadata.plugin_data.content
                    found.append(plugin_data_pb2.HParamsPluginData.FromString(content))
    return found


def test_after_a_rewind_each_step_is_there_once_with_its_new_number(tmp_path: Path) -> None:
    write(tmp_path, range(6), failed=True)
    write(tmp_path, range(3, 8), resumed_from=2, offset=0.5)
    assert loss(tmp_path) == [(0, 0), (1, 1), (2, 2), (3, 3.5), (4, 4.5), (5, 5.5), (6, 6.5), (7, 7.5)]


def test_a_fresh_run_shows_nothing_of_an_older_one(tmp_path: Path) -> None:
    write(tmp_path, range(6))
    write(tmp_path, range(2), offset=0.5)
    assert loss(tmp_path) == [(0, 0.5), (1, 1.5)]


@pytest.mark.parametrize(("folder", "target"), [("~/events", "home/events"), ("~events", "run/~events")])
def test_the_folder_may_begin_with_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, target: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    TensorboardLogger(TensorboardConfig(folder=folder), RunInfo(tmp_path / "run", "it")).close(failed=False)
    assert list((tmp_path / target).iterdir())


def test_files_made_within_a_second_are_read_in_order(tmp_path: Path) -> None:
    for attempt in range(4):
        write(tmp_path, [attempt + 1, attempt + 2], resumed_from=attempt, offset=attempt / 8)
    assert loss(tmp_path) == [(1, 1.0), (2, 2.125), (3, 3.25), (4, 4.375), (5, 5.375)]


def test_a_process_that_is_killed_leaves_every_step_it_logged(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from whet.interfaces.logger import RunInfo;"
        "from whet_tensorboard.config import TensorboardConfig; from whet_tensorboard.logger import TensorboardLogger;"
        "logger = TensorboardLogger(TensorboardConfig(), RunInfo(pathlib.Path(sys.argv[1]), 'it'));"
        "[logger.log(step, {'loss': step}) for step in (1, 2, 3)];"
        "assert 'torch' not in sys.modules and 'tensorflow' not in sys.modules;"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert loss(tmp_path) == [(1, 1), (2, 2), (3, 3)]


def test_the_config_is_there_as_text_for_each_run_attempt(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    write(tmp_path, range(3, 5), resumed_from=2)
    events = read(tmp_path).Tensors("config")
    assert [event.step for event in events] == [0, 2]
    assert "algorithm:\n  use: grpo\n" in events[0].tensor_proto.string_val[0].decode()


def test_the_config_is_there_as_hparams_and_how_the_run_ended(tmp_path: Path) -> None:
    write(tmp_path, [1], failed=True)
    write(tmp_path, [2], resumed_from=1)
    first, failed, _, done = sessions(tmp_path)
    found = first.session_start_info.hparams
    assert set(found) == {"run.steps", "run.export", "algorithm.use", "algorithm.loss.clip_low"}
    assert found["run.steps"].number_value == 4
    assert found["run.export"].bool_value is True
    assert found["algorithm.use"].string_value == "grpo"
    ends = [failed.session_end_info.status, done.session_end_info.status]
    assert ends == [api_pb2.STATUS_FAILURE, api_pb2.STATUS_SUCCESS]


def test_what_float32_cannot_hold_is_infinite(tmp_path: Path) -> None:
    logger = TensorboardLogger(TensorboardConfig(folder="deep/er"), RunInfo(tmp_path, "it"))
    logger.log(1, {"huge": -1e300, "nan": math.nan})
    logger.close(failed=False)
    events = EventAccumulator(str(tmp_path / "deep" / "er")).Reload()
    assert events.Scalars("huge")[0].value == -math.inf
    assert math.isnan(events.Scalars("nan")[0].value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, {}), ({"a": [{"b": None}, {"b": 1.5}], "c": []}, {"a.1.b": 1.5}), ({"a": "x", "b": False}, None)],
)
def test_values_have_dotted_paths(config: Any, expected: Any) -> None:
    assert values(config) == (config if expected is None else expected)


@pytest.mark.parametrize(
    ("edges", "counts", "expected"),
    [
        ([-1.0, 0.0, 2.0], [1, 2, 0, 4], [[-2, -1, 1], [-1, 0, 2], [0, 2, 0], [2, 4, 4]]),
        ([0.5], [3, 1], [[-0.5, 0.5, 3], [0.5, 1.5, 1]]),
    ],
)
def test_histograms_have_the_bins_of_their_grid(tmp_path: Path, edges: Any, counts: Any, expected: Any) -> None:
    logger = TensorboardLogger(TensorboardConfig(), RunInfo(tmp_path, "it", CONFIG, 4))
    rows = [{"step": 3, "name": "advantages", "edges": edges, "counts": counts}]
    logger.event(whet.interfaces.logger.Event("histograms", 3, rows=rows))
    logger.event(whet.interfaces.logger.Event("saved", 3))
    logger.close(failed=False)
    (found,) = read(tmp_path).Tensors("advantages")
    assert (found.step, make_ndarray(found.tensor_proto).tolist()) == (3, expected)
    assert read(tmp_path).PluginTagToContent("histograms") == {"advantages": b""}
