"""A run that is killed and resumed is one run at its tracker, with every step, by the tracker's own reader."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from whet.data.files import read_metrics, read_rows

STEPS = 6


def config(folder: Path, model: Path, logger: dict[str, object]) -> Path:
    path = folder / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "run": {"folder": str(folder / "run"), "steps": STEPS, "save_every": 2, "seed": 3},
                "model": {"path": str(model)},
                "algorithm": {"use": "grpo", "prompts_per_step": 2, "group_size": 4},
                "backend": {"use": "fsdp2", "optimizer": {"lr": 1e-3}},
                "generator": {"use": "hf"},
                "rollout": {"max_tokens": 8},
                "environments": [{"use": "even"}],
                "evaluation": {"every": 4, "environments": [{"use": "even", "split": "train", "limit": 4}]},
                "cluster": {"workers": "inline"},
                "loggers": [logger],
                "plugins": [str(Path(__file__).parent / "even_digits.py")],
            }
        )
    )
    return path


def killed_and_resumed(path: Path, start_whet, variables: dict[str, str] | None = None) -> Path:
    run = path.parent / "run"
    process = start_whet("run", path, folder=path.parent, variables=variables)
    while process.poll() is None and not (run / "checkpoints/step-000004").exists():
        time.sleep(0.005)
    process.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -9, output
    again = start_whet("run", path, folder=path.parent, variables=variables)
    output, _ = again.communicate(timeout=240)
    assert again.returncode == 0, output
    assert [row["event"] for row in read_rows(run / "journal.jsonl")].count("opened") == 2
    return run


def test_wandb_offline_has_one_run_with_every_step_and_tables(tmp_path, tiny_model_folder, start_whet):
    pytest.importorskip("wandb", "0.31", reason="wandb >= 0.31 is not installed")
    from whet_wandb.offline import files, history

    logger = {"use": "wandb", "mode": "offline", "rollouts_every": 3, "rollouts": 5}
    run = killed_and_resumed(config(tmp_path, tiny_model_folder, logger), start_whet)
    (run_id,) = {file.stem.removeprefix("run-") for file in run.glob("wandb/offline-run-*/*.wandb")}
    assert json.loads((run / "wandb.json").read_text()) == {"id": run_id, "folder": str(run.resolve())}
    found = files(run, run_id)
    assert len(found) == 2
    rows = [(file, row) for file in found for row in history(file)]
    numbers = [row["_step"] for _, row in rows]
    assert numbers == sorted(set(numbers)), "W&B would refuse or overwrite a row"

    steps = {row["step"]: row for _, row in rows if "attempt" in row}  # the last row of a step counts
    recorded = dict(read_metrics(run / "metrics.jsonl"))
    assert sorted(steps) == sorted(recorded) == list(range(STEPS + 1))
    for step, metrics in recorded.items():
        assert {name: steps[step][name] for name in metrics} == pytest.approx(metrics, nan_ok=True)
    assert [steps[step]["attempt"] for step in (1, STEPS)] == [1, 2]
    assert {step for step, row in steps.items() if row.get("advantages._type") == "histogram"} == set(
        range(1, STEPS + 1)
    )

    tables = [
        (name.removesuffix(".path"), json.loads((file.parent / "files" / row[name]).read_text()))
        for file, row in rows
        for name in row
        if name.endswith(".path")
    ]
    rollouts = {line[0]: table for name, table in tables if name == "rollouts" for line in table["data"]}
    assert set(rollouts) == {1, 3, 6}
    for step, table in rollouts.items():
        first = next(read_rows(run / f"rollouts/step-{step:06d}.jsonl"))
        shown = dict(zip(table["columns"], table["data"][0], strict=True))
        assert shown["response"] == first["messages"][-1]["content"]
        assert (shown["step"], shown["reward"], len(table["data"])) == (step, first["reward"], 5)
    assert {line[0] for name, table in tables if name == "evaluation/even/episodes" for line in table["data"]} == {
        0,
        4,
        6,
    }


def test_trackio_has_one_run_with_every_step_and_tables(tmp_path, tiny_model_folder, start_whet):
    pytest.importorskip("trackio", "0.43", reason="trackio >= 0.43 is not installed: it brings a web server")
    logger = {"use": "trackio", "rollouts_every": 3, "rollouts": 5}
    path = config(tmp_path, tiny_model_folder, logger)
    run = killed_and_resumed(path, start_whet, {"TRACKIO_DIR": str(tmp_path / "trackio")})
    name = json.loads((run / "trackio.json").read_text())["name"]
    code = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S; print(json.dumps([S.get_runs('whet'),"
    )
    code += " S.get_logs('whet', sys.argv[1])], default=str))"
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", code, name], env=environment, check=True, capture_output=True, text=True
    )
    runs, rows = json.loads(done.stdout.splitlines()[-1])
    assert runs == [name]
    steps = {row["step"]: row for row in rows if "attempt" in row}  # the last row of a step counts
    recorded = dict(read_metrics(run / "metrics.jsonl"))
    assert sorted(steps) == sorted(recorded) == list(range(STEPS + 1))
    for step, metrics in recorded.items():
        assert {key: steps[step][key] for key in metrics} == pytest.approx(metrics, nan_ok=True)
    tables = {row["step"]: row["rollouts"]["_value"] for row in rows if "rollouts" in row}
    assert {step: len(table) for step, table in tables.items()} == {1: 5, 3: 5, 6: 5}
    assert {row["step"] for row in rows if "advantages" in row} == set(range(1, STEPS + 1))
