"""A run that is killed anywhere and resumed gives, bit for bit, what an uninterrupted one gives."""

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import whet
from whet_testing.forking import Program
from whet_testing.journal import check
from whet_testing.runs import numbers

STEPS = 12
CONFIG = {
    "algorithm": {"use": "grpo", "prompts_per_step": 4, "group_size": 4, "minibatches": 2, "loss": "clipped-pg"},
    "backend": {"use": "fsdp2", "optimizer": {"lr": 1e-3}},
    "generator": {"use": "hf"},
    "rollout": {"max_tokens": 12},
    "cluster": {"threads": {"backend": 1, "generator": 1}},
}


def write_config(folder: Path, model: Path) -> Path:
    config = {
        "run": {"folder": str(folder / "run"), "steps": STEPS, "save_every": 1, "seed": 3},
        "model": {"path": str(model)},
        **CONFIG,
        "environments": [{"use": "even"}],
        "plugins": [str(Path(__file__).parent / "even_digits.py")],
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def start(start_whet) -> Callable[..., Program]:
    return lambda config, *overrides: start_whet("run", config, *overrides, folder=config.parent)


def finish(process: Program) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, tiny_model_folder, start):
    folder = tmp_path_factory.mktemp("whole")
    finish(start(write_config(folder, tiny_model_folder)))
    return folder / "run"


def same(run: Path, whole: Path) -> None:
    assert numbers(run, "probe/") == numbers(whole, "probe/")  # every run attempt begins with two probes
    assert (run / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    for step in range(1, STEPS + 1):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (run / name).read_text() == (whole / name).read_text()


def test_training_moves(uninterrupted):
    rows = numbers(uninterrupted, "probe/")
    assert len(rows) == STEPS
    assert all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.slow
def test_ten_kills_at_any_moment_change_no_bit(tmp_path, tiny_model_folder, uninterrupted, no_orphans, start):
    config, draw = write_config(tmp_path, tiny_model_folder), random.Random(7)
    run, kills = tmp_path / "run", 0
    while kills < 10:
        process = start(config)
        # A third of the kills hit the start; the others wait for a step of this run attempt, and then some.
        before = len(list(run.glob("rollouts/*"))) if draw.random() > 0.3 else None
        deadline = time.time() + 60
        while before is not None and process.poll() is None and time.time() < deadline:
            if len(list(run.glob("rollouts/*"))) > before:
                break
            time.sleep(0.005)
        time.sleep(draw.random() * (0.1 if before is not None else 1.5))
        if process.poll() is not None:
            break
        process.kill()
        process.communicate()
        kills += 1
    finish(start(config))
    assert kills >= 5
    same(run, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "staleness", "on_weight_update"), [("fifo", 1, "abort"), ("as_completed", 2, "continue")]
)
def test_with_staleness_no_kill_loses_a_group_or_trains_one_twice(
    tmp_path, tiny_model_folder, order, staleness, on_weight_update, start
):
    config, draw, run = write_config(tmp_path, tiny_model_folder), random.Random(order), tmp_path / "run"
    overrides = [
        f"rollout.order={order}",
        f"rollout.max_staleness={staleness}",
        f"rollout.on_weight_update={on_weight_update}",
    ]
    overrides.append("cluster.workers=inline")
    for _ in range(2):
        process = start(config, *overrides, "run.steps=30")
        before, deadline = len(list(run.glob("rollouts/*"))), time.time() + 120
        while process.poll() is None and time.time() < deadline and len(list(run.glob("rollouts/*"))) <= before:
            time.sleep(0.005)
        time.sleep(draw.random() * 0.3)
        assert process.poll() is None, process.communicate()[0]
        process.kill()
        process.communicate()
        assert check(run) == []
    last = max(int(folder.name[5:]) for folder in (run / "checkpoints").glob("step-*[0-9]"))
    finish(start(config, *overrides, f"run.steps={last + 4}"))
    assert check(run) == []
    rows = numbers(run, "probe/")
    assert [row["step"] for row in rows] == list(range(1, last + 5))
    assert 0 < max(row["staleness/max"] for row in rows) <= staleness
    assert not any(row["episodes/failed"] or row["groups/dropped"] for row in rows)


@pytest.mark.slow
def test_sigterm_saves_and_ends_cleanly(tmp_path, tiny_model_folder, uninterrupted, no_orphans, start):
    config = write_config(tmp_path, tiny_model_folder)
    process = start(config, "run.save_every=100")
    while not (tmp_path / "run/rollouts/step-000003.jsonl").exists():
        time.sleep(0.01)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "continues" in output
    assert len(list((tmp_path / "run/checkpoints").glob("step-*"))) == 1
    finish(start(config))
    same(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("algorithm.group_size=8", "algorithm.group_size: the run has 4, the config gives 8"),
        ("algorithm.loss.clip_high=0.3", "algorithm.loss.clip_high: the run has 0.2, the config gives 0.3"),
        ("run.seed=4", "run.seed: the run has 3, the config gives 4"),
        ("rollout.temperature=0.7", "rollout.temperature: the run has 1.0, the config gives 0.7"),
    ],
)
def test_another_runs_folder_is_refused_with_the_difference(uninterrupted, override, shown, start):
    process = start(uninterrupted.parent / "run.yaml", override)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert shown in output
    assert "Traceback" not in output


def test_another_runs_folder_is_left_as_it_was(uninterrupted, start):
    before = (uninterrupted / "journal.jsonl").read_bytes()
    start(uninterrupted.parent / "run.yaml", "run.seed=4").communicate(timeout=60)
    assert (uninterrupted / "journal.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_run_is_refused(tmp_path, uninterrupted, start):
    shutil.copytree(uninterrupted / "checkpoints", tmp_path / "run/checkpoints")
    process = start(uninterrupted.parent / "run.yaml", f"run.folder={tmp_path}/run", "run.seed=4")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "run.seed: the run has 3, the config gives 4" in output


def test_another_model_in_the_same_place_is_refused(tmp_path, uninterrupted, tiny_tokenizer, start):
    from whet_start.small_models import make_model

    other = make_model(tmp_path / "other", tiny_tokenizer, seed=99)
    process = start(uninterrupted.parent / "run.yaml", f"model.path={other}")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "model files.weights" in output


def test_a_finished_run_has_nothing_left_to_do(uninterrupted, start):
    before = {file: file.stat().st_mtime_ns for file in uninterrupted.rglob("*") if file.is_file()}
    said = finish(start(uninterrupted.parent / "run.yaml", "loggers=[console]"))
    memory = "predict and measure the memory of each role: by phase, without weights, and changes that make it fit"
    page = (
        f"`whet memory {uninterrupted}`: {memory}, and `whet report {uninterrupted}`: write one HTML page about a run"
    )
    assert said.splitlines() == [
        "this run is finished, all 12 steps of it; nothing was started",
        f"results: the model is in {uninterrupted}/model, and {page}",
        f"to go on: whet run {uninterrupted.parent}/run.yaml 'loggers=[console]' run.steps=24",
        "to start afresh: another run.folder",
    ]
    assert {file: file.stat().st_mtime_ns for file in uninterrupted.rglob("*") if file.is_file()} == before


def test_a_run_that_was_killed_at_its_very_end_is_closed(tmp_path, uninterrupted, start):
    shutil.copytree(uninterrupted, tmp_path / "run")
    journal = tmp_path / "run/journal.jsonl"
    *before, last = journal.read_text().splitlines(keepends=True)
    assert json.loads(last)["event"] == "closed"
    journal.write_text("".join(before))
    (tmp_path / "run/scratch/weights").mkdir(parents=True)
    assert "nothing was started" in finish(start(uninterrupted.parent / "run.yaml", f"run.folder={tmp_path}/run"))
    assert [json.loads(line)["event"] for line in journal.read_text().splitlines()[len(before) :]] == ["closed"]
    assert not (tmp_path / "run/scratch").exists()


def test_a_finished_run_that_lacks_its_model_writes_it(tmp_path, uninterrupted, start):
    shutil.copytree(uninterrupted, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/model")
    finish(start(uninterrupted.parent / "run.yaml", f"run.folder={tmp_path}/run"))
    same(tmp_path / "run", uninterrupted)


def test_a_run_that_an_earlier_version_wrote_is_exported(tmp_path, uninterrupted, start_whet):
    run, out = shutil.copytree(uninterrupted, tmp_path / "run"), tmp_path / "model"
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["refit"], config["cluster"]["share"] = config.pop("weight_sync"), config["cluster"].pop("colocate")
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    finish(start_whet("export", run, out, folder=tmp_path))
    assert (out / "model.safetensors").read_bytes() == (run / "model/model.safetensors").read_bytes()


def test_a_second_ctrl_c_ends_a_run_that_did_not_fail(tmp_path, tiny_model_folder, capsys):
    config = write_config(tmp_path, tiny_model_folder)
    with pytest.raises(KeyboardInterrupt), whet.open(config, "loggers=[console]", "cluster.workers=inline"):
        raise KeyboardInterrupt
    assert "run ended at step 0; everything it wrote is in" in capsys.readouterr().out
    last = json.loads((tmp_path / "run/journal.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["by"]) == ("closed", "KeyboardInterrupt")


CARRIED = (
    "run.steps=4", "cluster.workers=inline", "backend.reference=true", "algorithm.advantages=remax",
    "algorithm.kl_reward={weight: 0.2, adaptive: {target: 0.001, horizon: 20}}", "algorithm.top_entropy={share: 0.5}",
    "algorithm.loss={use: sapo, off_policy: {threshold: 0.01}, likelihood: {weight: 0.1}}",
)  # fmt: skip


def test_what_an_algorithm_carries_from_step_to_step_survives_to_the_last_bit(tmp_path, tiny_model_folder, start):
    runs = {}
    for name, attempts in (("whole", [4]), ("again", [2, 4])):
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name, tiny_model_folder)
        for steps in attempts:
            finish(start(config, *CARRIED, f"run.steps={steps}"))
        runs[name] = tmp_path / name / "run"
    whole, again = (numbers(run, "probe/") for run in runs.values())
    assert whole == again
    weights = [row["kl_reward/weight"] for row in whole]
    assert weights[0] == 0.2
    assert len(set(weights)) == 4
    assert all("reward/greedy" in row and row["top_entropy/share"] >= 0.5 for row in whole)
    one, other = ((run / "model/model.safetensors").read_bytes() for run in runs.values())
    assert one == other
