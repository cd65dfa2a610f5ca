"""The JSON lines logger: what it writes, what it leaves out, and that a resumed run writes no step twice."""

import json
import math

import pytest

from whet.component import resolve
from whet.interfaces.logger import Logger, RunInfo
from whet_jsonl import hooks
from whet_jsonl.config import JsonlConfig
from whet_jsonl.logger import JsonlLogger


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(folder, steps, resumed_from=0, config=None):
    logger = JsonlLogger(config or JsonlConfig(), RunInfo(folder=folder, name="x", resumed_from=resumed_from))
    for step in steps:
        logger.log(step, {"loss": step / 2, "reward/mean": 1.0})
    logger.close(failed=False)


def test_the_hook_offers_a_logger_that_can_be_imported(tmp_path):
    (component,) = hooks.whet_loggers()
    logger = resolve(component.target)(component.config(), RunInfo(folder=tmp_path, name="x"))
    assert isinstance(logger, Logger)
    logger.close(failed=False)
    logger.close(failed=False)


def test_each_step_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    logger = JsonlLogger(JsonlConfig(), RunInfo(folder=tmp_path, name="x"))
    logger.log(3, {"b": 2.0, "a": 1.5})
    assert (tmp_path / "metrics-log.jsonl").read_text() == '{"step": 3, "a": 1.5, "b": 2.0}\n'


def test_a_resumed_run_writes_no_step_twice(tmp_path):
    write(tmp_path, range(6))
    with (tmp_path / "metrics-log.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    write(tmp_path, range(4, 8), resumed_from=3)
    assert [row["step"] for row in rows(tmp_path / "metrics-log.jsonl")] == list(range(8))


def test_a_fresh_run_starts_with_an_empty_file(tmp_path):
    write(tmp_path, range(3))
    write(tmp_path, [0])
    assert [row["step"] for row in rows(tmp_path / "metrics-log.jsonl")] == [0]


@pytest.mark.parametrize(("path", "file"), [("~/log.jsonl", "home/log.jsonl"), ("~log.jsonl", "run/~log.jsonl")])
def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch, path, file):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    logger = JsonlLogger(JsonlConfig(path=path), RunInfo(tmp_path / "run", "it"))
    logger.log(1, {"loss": 1.0})
    assert (tmp_path / file).read_text() == '{"step": 1, "loss": 1.0}\n'
    logger.close(failed=False)


def test_patterns_choose_metrics_and_steps_without_any_write_nothing(tmp_path):
    config = JsonlConfig(path="deep/er.jsonl", include=["reward/*", "loss"], exclude=["loss"])
    logger = JsonlLogger(config, RunInfo(folder=tmp_path, name="x"))
    logger.log(1, {"loss": 1.0})
    logger.log(2, {"loss": 1.0, "reward/mean": 0.5, "tokens": 7.0})
    logger.close(failed=False)
    assert rows(tmp_path / "deep" / "er.jsonl") == [{"step": 2, "reward/mean": 0.5}]


def test_every_line_is_valid_json_whatever_the_numbers(tmp_path):
    logger = JsonlLogger(JsonlConfig(), RunInfo(folder=tmp_path, name="x"))
    logger.log(1, {"loss": math.nan, "grad_norm": math.inf, 'a "name"\n': 1.0})
    logger.close(failed=False)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = (tmp_path / "metrics-log.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "loss": None, "grad_norm": None, 'a "name"\n': 1.0}


def test_a_dash_writes_to_standard_output(tmp_path, capsys):
    write(tmp_path, [1], config=JsonlConfig(path="-"))
    assert json.loads(capsys.readouterr().out) == {"step": 1, "loss": 0.5, "reward/mean": 1.0}
    assert not list(tmp_path.iterdir())
