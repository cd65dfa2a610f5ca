"""The plot logger: which curves, and an image that can be read back."""

import json
import resource
import subprocess
import sys

import numpy as np
import pytest

from whet.component import resolve
from whet.interfaces.logger import Logger, RunInfo
from whet_plot import hooks
from whet_plot.config import PlotConfig
from whet_plot.logger import PlotLogger
from whet_plot.series import panels, read_rows, smooth


def grpo_rows(steps=60):
    random = np.random.default_rng(0)
    for step in range(steps + 1):
        row = {"step": step, "time": float(step)}
        if step:
            reward = 0.35 + 0.45 * (1 - np.exp(-step / 15)) + random.normal(0, 0.05)
            row |= {"loss": random.normal(0, 0.01), "reward/mean": reward, "response_length/mean": 12 + step / 4}
        if step % 10 == 0:
            reward, name = 0.39 + step / 150, "evaluation/test/reward"
            row |= {name: reward, f"{name}/ci_low": reward - 0.04, f"{name}/ci_high": reward + 0.03}
        yield row


def write(folder, rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_hook_offers_a_logger_that_can_be_imported(tmp_path):
    (component,) = hooks.whet_loggers()
    logger = resolve(component.target)(component.config(), RunInfo(folder=tmp_path, name="x"))
    assert isinstance(logger, Logger)
    logger.close(failed=False)
    assert not list(tmp_path.iterdir()), "a run without metrics gets no image"


def test_the_image_shows_the_run(tmp_path):
    from matplotlib.image import imread

    write(tmp_path, grpo_rows())
    logger = PlotLogger(PlotConfig(), RunInfo(folder=tmp_path, name="$a_run$ \\frac"))
    logger.close(failed=True)
    logger.close(failed=True)
    image = imread(tmp_path / "plot.png")
    assert image.shape[1] > 1000
    assert image.shape[0] > 400
    assert image.std() > 0.05, "not an empty canvas"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "plot.png"]


@pytest.mark.parametrize(("file", "target"), [("~/plot.svg", "home/plot.svg"), ("~plot.svg", "~plot.svg")])
def test_the_file_may_begin_with_the_home_folder(tmp_path, monkeypatch, file, target):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(tmp_path, grpo_rows())
    PlotLogger(PlotConfig(file=file), RunInfo(folder=tmp_path, name="x")).close(failed=False)
    assert (tmp_path / target).exists()


def test_an_image_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path):
    write(tmp_path, grpo_rows())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            PlotLogger(PlotConfig(file="plot.svg"), RunInfo(folder=tmp_path, name="x")).close(failed=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("name", ["plot.pgf", "plot.gif", ".png", "plot"])
def test_a_file_that_cannot_be_drawn_is_refused(name):
    with pytest.raises(ValueError, match="must match regex"):
        PlotConfig(file=name)


def test_default_panels_follow_the_kind_of_training(tmp_path):
    write(tmp_path, grpo_rows())
    titles = [panel.title for panel in panels(read_rows(tmp_path / "metrics.jsonl"))]
    assert titles == ["evaluation reward", "training reward", "response length [tokens]"]
    offline = {1: {"loss": 2.0, "grad_norm": 1.0}, 2: {"loss": 1.0, "validation/loss": 1.5}}
    (panel,) = panels(offline)
    assert [series.name for series in panel.series] == ["loss", "validation/loss"]


def test_panels_of_the_config_take_patterns():
    rows = {1: {"reward/a": 1.0, "reward/b": 2.0, "loss": 3.0}}
    found = panels(rows, [["reward/*"], ["nothing"], ["loss", "reward/a"]])
    assert [[s.name for s in panel.series] for panel in found] == [["reward/a", "reward/b"], ["loss", "reward/a"]]


def test_a_band_needs_an_interval_at_every_point_and_nan_is_no_point():
    name = "evaluation/t/pass@4"
    rows = {0: {name: 0.5, f"{name}/ci_low": 0.4, f"{name}/ci_high": 0.7}, 1: {name: float("nan")}}
    (panel,) = panels(rows, [["evaluation/*"]])
    (series,) = panel.series
    assert series.band.tolist() == [[0.4, 0.7]]
    rows[2] = {name: 0.6}
    assert panels(rows, [["evaluation/*"]])[0].series[0].band is None


def test_a_repeated_step_counts_once_and_a_broken_line_not_at_all(tmp_path):
    text = '{"step": 2, "loss": 9}\n{"step": 1, "loss": 3}\n{"step": 2, "loss": 2, "time": 1}\n{"step": 3, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert read_rows(tmp_path / "metrics.jsonl") == {1: {"loss": 3.0}, 2: {"loss": 2.0}}


@pytest.mark.parametrize("length", [1, 2, 5, 100])
def test_smoothing_leaves_a_line_as_it_is(length):
    line = np.arange(length, dtype=np.float64)
    assert np.allclose(smooth(line), line)


def test_smoothing_averages_the_neighbourhood():
    assert np.allclose(smooth(np.array([0.0, 0.0, 3.0, 0.0, 0.0])), [0, 1, 0.6, 1, 0])


def test_a_huge_value_changes_the_mean_of_its_neighbourhood_alone():
    assert smooth(np.array([2.0] * 50 + [1e18] + [0.5] * 100))[-40:] == pytest.approx(0.5)


def test_matplotlib_is_not_imported_before_there_is_something_to_draw():
    code = "import sys, whet_plot.hooks, whet_plot.logger; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
