"""The recipes of adapters: libraries of others, unmodified. Each trains two steps and evaluates, with a tiny model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from whet.run.compose import run

ROOT = Path(__file__).parents[2]
NEEDED = {"reasoning-gym-grpo": "reasoning_gym", "gymnasium-grpo": "gymnasium"}
every_recipe = pytest.mark.parametrize("name", NEEDED)
TWO_STEPS = (
    "run.steps=2", "run.save_every=2", "cluster.workers=inline", "loggers=[]", "algorithm.prompts_per_step=5",
    "algorithm.group_size=2", "rollout.max_tokens=8", "rollout.max_context=0",
)  # fmt: skip


@pytest.fixture(autouse=True)
def library(name: str) -> None:
    pytest.importorskip(NEEDED[name], reason=f"{NEEDED[name]} is not installed; `nox -s adapters` installs it")


@pytest.fixture
def model(tiny_models: Any) -> Path:
    """A tiny model with room for the rules of a game and for the library's system message."""
    return tiny_models("qwen3", max_positions=4096)


def read(name: str) -> tuple[Path, dict[str, Any]]:
    path = ROOT / "recipes" / f"{name}.yaml"
    return path, yaml.safe_load(path.read_text(encoding="utf-8"))


def overrides(document: dict[str, Any], model: Path, folder: Path) -> list[str]:
    entries = document["evaluation"]["environments"]
    limits = [f"evaluation.environments.{i}.limit=3" for i in range(len(entries))]
    return [f"model.path={model}", f"run.folder={folder / 'run'}", *TWO_STEPS, *limits]


@every_recipe
def test_a_recipe_of_an_adapter_trains_and_evaluates(name: str, model: Path, tmp_path: Path) -> None:
    path, document = read(name)
    outcome = run(path, overrides(document, model, tmp_path))
    assert outcome.finished
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["step"]] == [1, 2]
    for entry in document["evaluation"]["environments"]:
        assert f"evaluation/{entry['name']}/reward" in rows[-1]
    names = {f"{entry['name']}/reward/mean" for entry in document["environments"]}
    assert names <= set().union(*rows), "with five prompts a step, each environment has its share"
    assert not any(row.get("episodes/failed") or row.get("groups/dropped") for row in rows)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@every_recipe
def test_a_recipe_of_an_adapter_is_checked_without_importing_the_library(
    name: str, model: Path, tmp_path: Path
) -> None:
    path, document = read(name)
    code = (
        "import sys\nfrom whet.cli.app import group\n"
        "code = group.main(['check', *sys.argv[1:]], standalone_mode=False)\n"
        f"print('loaded:', {NEEDED[name]!r} in sys.modules, 'torch' in sys.modules)\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), *overrides(document, model, tmp_path)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("structure: ok\nproblems: none\nplan:\n")
    assert done.stdout.splitlines()[-1] == "loaded: False False"
