"""Every recipe is right as it stands, is checked at once without anything heavy, and trains."""

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from whet.run.compose import run
from whet_testing.runs import numbers

ROOT = Path(__file__).parents[1]
ADAPTERS = {"gymnasium-grpo", "reasoning-gym-grpo"}  # they need libraries of others; tests/adapters train them
RECIPES = sorted(
    path for path in (*ROOT.glob("recipes/*.yaml"), *ROOT.glob("examples/**/*.yaml")) if path.stem not in ADAPTERS
)
HEAVY = ("torch", "ray", "transformers", "datasets", "vllm", "sglang", "math_verify")
MEGATRON = ROOT / "recipes" / "learn-grpo-megatron.yaml"
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
in_one_process = pytest.mark.parametrize("recipe", [path for path in RECIPES if path != MEGATRON], ids=lambda p: p.stem)


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records that fit every recipe fed by data: conversations, questions with answers, pairs, answers with labels."""
    file = tmp_path_factory.mktemp("records") / "records.jsonl"
    lines = []
    for n in range(40):
        question, answer = f"Compute {n}+8-3.", f"{n}+8={n + 8}, {n + 8}-3={n + 5}. #### {n + 5}"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        pair = {"prompt": question, "chosen": answer, "rejected": "no"}
        labelled = {"completion": answer if n % 2 else "no", "label": bool(n % 2)}
        asked = {"question": question, "answer": answer, "solution": answer}
        lines.append(json.dumps({"messages": messages, **asked, **pair, **labelled}))
    file.write_text("\n".join(lines))
    return file


@pytest.fixture
def needed(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Install the package that a recipe lies in, where it does, for this test; give the variables that do so too."""
    folders: list[str] = []
    if (recipe.parent / "pyproject.toml").is_file():
        project = tomllib.loads((recipe.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        info = tmp_path / "site" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        lines = [f"{entry} = {module}" for entry, module in project["entry-points"]["whet"].items()]
        (info / "entry_points.txt").write_text("\n".join(["[whet]", *lines]))
        folders = [str(info.parent), str(recipe.parent / "src")]
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


@pytest.fixture
def tiny_model(recipe: Path, request: pytest.FixtureRequest) -> Path:
    """Return a tiny model of the kind that a recipe needs: a mixture of experts, or a long context for a judge."""
    if "experts" in whole(recipe).get("backend", {}):
        return request.getfixturevalue("tiny_models")("qwen3_moe")  # type: ignore[no-any-return] # of any fixture
    if "judge" in whole(recipe).get("roles", {}):  # it reads a rubric beside the response
        return request.getfixturevalue("tiny_models")("qwen3", max_positions=1024)  # type: ignore[no-any-return]
    return request.getfixturevalue("tiny_model_folder")  # type: ignore[no-any-return] # of any fixture


def whole(recipe: Path) -> dict[str, Any]:
    """Return a recipe together with what it extends: sections of the recipe itself go before."""
    document: dict[str, Any] = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    extended = document.pop("extends", None)
    below = whole(recipe.parent / extended) if extended else {}
    both = {name: {**below[name], **document[name]} for name in below.keys() & document.keys()}
    return {**below, **document, **both}


def local(recipe: Path, model: Path, records: Path, folder: Path, judge_of: Callable[[Path], Path]) -> list[str]:
    """Return the overrides that put local files in the place of those a recipe names."""
    document = whole(recipe)
    given = [f"model.path={model}", f"run.folder={folder / 'run'}"]
    for name, role in document.get("roles", {}).items():
        if "model" in role:
            given.append(f"roles.{name}.model.path={judge_of(model) if role.get('head') == 'value' else model}")
    for part in ("train", "validation"):
        given += [f"data.{part}.{i}.path={records}" for i, _ in enumerate(document.get("data", {}).get(part, ()))]
    evaluated = document.get("evaluation", {}).get("environments", ())
    for path, entries in (("environments", document.get("environments", ())), ("evaluation.environments", evaluated)):
        for i, entry in enumerate(entries):
            given += [f"{path}.{i}.dataset={records}"] * ("dataset" in entry)
            given += [f"{path}.{i}.environment.dataset={records}"] * ("dataset" in entry.get("environment", ""))
    return given


def small(recipe: Path) -> list[str]:
    """Return the overrides that make two short steps of a recipe."""
    document = whole(recipe)
    given = ["run.steps=2", "cluster.workers=inline", "loggers=[]"]
    by_algorithm = {
        "grpo": ["algorithm.prompts_per_step=2", "algorithm.group_size=2"],
        "ppo": ["algorithm.prompts_per_step=4", "algorithm.critic_warmup=1"],
        "distill": ["algorithm.prompts_per_step=4"],
        "sft": ["algorithm.batch_size=4", "algorithm.validate_every=1"],
        "dpo": ["algorithm.batch_size=4", "algorithm.validate_every=1"],
        "rm": ["algorithm.batch_size=4", "algorithm.validate_every=1"],
        "kto": ["algorithm.batch_size=4", "algorithm.validate_every=1"],
    }
    given += by_algorithm[document["algorithm"]["use"]]
    if document["algorithm"].get("filters"):
        given += ["algorithm.filters=[]"]  # of a random model none might pass
    if "generator" in document:
        given += ["rollout.max_tokens=6", "rollout.max_context=0"]
    given += ["data.max_length=0"] * ("data" in document)
    entries = document.get("evaluation", {}).get("environments", ())
    return [*given, *(f"evaluation.environments.{i}.limit=3" for i, _ in enumerate(entries))]


CHECK = f"""
import cProfile
import sys
with cProfile.Profile() as profile:
    from whet.cli.app import group
    code = group.main(["check", *sys.argv[1:]], standalone_mode=False)
print("calls:", sum(entry.callcount for entry in profile.getstats()))
print("loaded:", *sorted(set({HEAVY!r}) & set(sys.modules)))
sys.exit(code)
"""


@every_recipe
def test_a_recipe_is_checked_at_once_without_anything_heavy(recipe, needed, tiny_model, records, tmp_path, judge_of):
    overrides = local(recipe, tiny_model, records, tmp_path, judge_of)
    # The tiny model is shorter than those that recipes are for.
    overrides += ["rollout.max_tokens=100", "rollout.max_context=0"]
    overrides += ["data.max_length=0"] * ("data" in whole(recipe))
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(recipe), *overrides],
        capture_output=True, text=True, env=needed, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("structure: ok\nproblems: none\nplan:\n")
    *_, calls, loaded = done.stdout.splitlines()
    assert loaded == "loaded:"
    # Less than a second on a usual core. Time depends on the machine, the number of calls does not.
    assert 100_000 < int(calls.removeprefix("calls:")) < 1_500_000


@in_one_process
def test_a_recipe_trains(recipe, needed, tiny_model, records, tmp_path, judge_of):
    overrides = [*local(recipe, tiny_model, records, tmp_path, judge_of), *small(recipe)]
    outcome = run(recipe, overrides)
    assert outcome.finished
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["step"]] == [1, 2]
    document = whole(recipe)
    for entry in document.get("evaluation", {}).get("environments", ()):
        assert f"evaluation/{entry.get('name', entry['use'])}/reward" in rows[-1]
    if document.get("data", {}).get("validation"):
        assert rows[-1]["validation/loss"] > 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_the_recipe_with_megatron_differs_from_the_one_with_fsdp2_in_the_backend_and_its_ranks_alone():
    plain, found = whole(MEGATRON.with_name("learn-grpo.yaml")), whole(MEGATRON)
    plain["run"]["folder"], plain["cluster"] = found["run"]["folder"], {"ranks": {"backend": 2}}
    plain["backend"] |= {"use": "megatron", "parallel": {"tensor": 2}}
    assert found == plain


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed here")
@pytest.mark.parametrize("name", ["learn-sft", "learn-dpo", "learn-rm", "learn-ppo", "learn-distill"])
def test_a_recipe_trains_alike_with_megatron_in_the_place_of_fsdp2(
    name, whet, tiny_model_folder, tiny_models, records, tmp_path, judge_of
):  # fmt: skip
    recipe = ROOT / "recipes" / f"{name}.yaml"
    overrides = [*local(recipe, tiny_model_folder, records, tmp_path, judge_of), *small(recipe), "run.export=false"]
    sections = {"backend": "backend"} | {role: f"roles.{role}" for role in whole(recipe).get("roles", {})}
    if "teacher" in sections:  # of itself there is nothing to learn
        overrides.append(f"roles.teacher.model.path={tiny_models('llama', seed=1)}")
    assert run(recipe, overrides).finished
    overrides += [f"run.folder={tmp_path / 'megatron'}", "cluster.workers=process"]
    for role, section in sections.items():
        overrides += [f"{section}.use=megatron", f"{section}.parallel.tensor=2", f"cluster.ranks.{role}=2"]
    ended = whet("run", recipe, *overrides)
    assert ended.code == 0, ended.errors
    steps = [numbers(tmp_path / name) for name in ("run", "megatron")]
    assert len(steps[0]) == len(steps[1]) >= 2
    for expected, found in zip(*steps, strict=True):
        compared = {key: value for key, value in expected.items() if "loss" in key or "grad_norm" in key}
        assert {key: found[key] for key in compared} == pytest.approx(compared, rel=1e-4, abs=1e-5)
    assert any(row.get("grad_norm") for row in steps[0])
