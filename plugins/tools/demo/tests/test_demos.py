"""Demos in the packages of plugins, a demo's folder, and what it starts from."""

import json
import sys
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml

from whet.errors import ConfigError, PluginError
from whet.plan.load import load_config
from whet.plan.roles import selections
from whet.plugins.registry import Registry, load_plugins
from whet_demo.demos import demo, demos, rebased
from whet_demo.stages import course, stages
from whet_demo.start import make_start, write_start
from whet_start.recipes import recipe

WARM = """\
# A warm start: nothing is sharp yet. More follows.
run: {folder: runs/sums/warm, steps: 60}
model: {path: runs/sums/start}
algorithm: sft
backend: fsdp2
data: {train: [{path: runs/sums/start/train.jsonl}]}
"""
SHARP = """\
# Sharper.
run: {folder: runs/sums/sharp, steps: 20}
model: {path: runs/sums/warm/model}
algorithm: sft
backend: fsdp2
data: {train: [{path: runs/sums/start/train.jsonl}]}
"""
DEMO = """\
[sums]
about = "it adds"
demonstrations = "whet_kit.sums:demonstrations"
folder = "runs/sums"
recipes = ["warm", "sharp"]
minutes = 1
"""
Kit = Callable[..., Registry]


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    """Install a package with recipes and a demo beside what is installed; return the registry."""

    def make(demo: str = DEMO) -> Registry:
        package, info = tmp_path / "site" / "whet_kit", tmp_path / "site" / "whet_kit-1.0.dist-info"
        (package / "recipes").mkdir(parents=True)
        info.mkdir()
        for name in ("__init__.py", "hooks.py"):
            (package / name).touch()
        (package / "demos.toml").write_text(demo)
        for stem, text in (("warm", WARM), ("sharp", SHARP)):
            (package / "recipes" / f"{stem}.yaml").write_text(text)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: whet-kit\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[whet]\nkit = whet_kit.hooks\n")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        for name in ("whet_kit", "whet_kit.hooks"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return load_plugins()

    return make


def test_demos_of_installed_packages_are_found_and_an_unknown_one_gives_the_nearest(kit: Kit) -> None:
    registry = kit()
    assert demo(registry, "sums").distribution == "whet-kit"
    assert list(demos(registry)) == sorted(demos(registry))
    with pytest.raises(ConfigError, match="there is no demo 'sumss' \\(did you mean 'sums'\\?\\)"):
        demo(registry, "sumss")


def test_everything_that_a_demo_uses_is_required() -> None:
    registry = load_plugins()
    required = {line.partition(">")[0].partition("<")[0] for line in requires("whet-demo") or []}
    found = demos(registry)
    assert {"arithmetic", "calculator"} <= set(found)
    for one in (found["arithmetic"], found["calculator"]):
        configs = [load_config(recipe(registry, name).path, registry=registry).config for name in one.recipes]
        used = {selection.distribution for config in configs for _, selection in selections(config)}
        assert {one.distribution, *used} <= required


def test_a_demo_with_wrong_keys_is_refused_by_file_and_key(kit: Kit) -> None:
    with pytest.raises(PluginError, match=r"demos\.toml: \[sums\] must have the keys .*; see: minute, minutes"):
        demos(kit(demo=DEMO.replace("minutes", "minute")))


@pytest.mark.parametrize(("line", "layers"), [("", 4), ("layers = 3\n", 3)])
def test_a_demo_may_state_the_layers_of_its_model(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, layers: int
) -> None:
    found = demos(kit(demo=DEMO + line))["sums"]
    records = [{"messages": [{"role": "user", "content": f"Say {n}."}]} for n in range(300)]
    monkeypatch.setattr("whet_demo.start.resolve", lambda path: lambda count, seed: records)
    make_start(found, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "start" / "config.json").read_text(encoding="utf-8"))
    assert config["num_hidden_layers"] == layers


@pytest.mark.parametrize("folder", ["tried", "/some/where else", "it's: #1", "a,b"])
def test_a_demo_writes_its_recipes_with_paths_in_its_own_folder(kit: Kit, tmp_path: Path, folder: str) -> None:
    registry, into = kit(), tmp_path / folder.removeprefix("/")
    warm, sharp = stages(demo(registry, "sums"), into, registry)
    assert [stage.folder for stage in (warm, sharp)] == [into / "warm", into / "sharp"]
    written = yaml.safe_load(warm.recipe.read_text())
    assert written["model"]["path"] == f"{into}/start"
    assert written["data"]["train"] == [{"path": f"{into}/start/train.jsonl"}]
    assert yaml.safe_load(sharp.recipe.read_text())["model"]["path"] == f"{into}/warm/model"
    assert warm.overrides == sharp.overrides == ()


def test_other_paths_are_left_alone() -> None:
    text = "a: runs/sums-2/x\nb: my/runs/sums\nc: runs/sums\n# runs/sums, of course: (runs/sums/warm).\n"
    assert rebased(text, "runs/sums", "here") == (
        "a: runs/sums-2/x\nb: my/runs/sums\nc: here\n# here, of course: (here/warm).\n"
    )


def test_fewer_steps_shorten_all_runs_alike_and_a_seed_is_for_all(kit: Kit, tmp_path: Path) -> None:
    registry = kit()
    warm, sharp = stages(demo(registry, "sums"), tmp_path / "it", registry, steps=5, seed=3)
    assert (warm.steps, sharp.steps) == (15, 5)
    assert warm.overrides == ("run.seed=3", "run.steps=15")
    assert sharp.overrides == ("run.seed=3", "run.steps=5")


def test_a_recipe_that_was_changed_is_kept(kit: Kit, tmp_path: Path) -> None:
    registry = kit()
    warm, _ = stages(demo(registry, "sums"), tmp_path / "it", registry)
    warm.recipe.write_text(warm.recipe.read_text().replace("steps: 60", "steps: 6"))
    assert [stage.steps for stage in stages(demo(registry, "sums"), tmp_path / "it", registry)] == [6, 20]


def test_the_course_of_a_run_is_its_reward_or_else_its_held_out_loss(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step": 0, "validation/loss": 3.0}\n{"step": 5, "loss": 1.0}\n{"step": 9, "validation/loss": 2.0}\n'
    )
    found = course(tmp_path)
    assert found is not None
    assert (found.metric, found.values) == ("validation/loss", ((0, 3.0), (9, 2.0)))
    file.write_text('{"step": 0, "validation/loss": 3.0, "evaluation/sums/reward": 0.5}\n')
    found = course(tmp_path)
    assert found is not None
    assert found.metric == "evaluation/sums/reward"
    file.write_text('{"step": 0, "loss": 3.0}\n')
    assert course(tmp_path) is None
    file.write_text('{"step": 0, "validation/loss": 3.0}\n{"step": 1, "valid\n7\n{"validation/loss": 2.0}\n{"step": 2')
    found = course(tmp_path)
    assert found is not None
    assert found.values == ((0, 3.0),), "damaged lines are left out"


def test_a_start_is_a_model_and_its_data_and_is_made_once(tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": str(n)}]}
        for n in range(30)
    ]
    write_start(tmp_path / "start", records, held_out=10)
    lines = {name: (tmp_path / "start" / f"{name}.jsonl").read_text().splitlines() for name in ("train", "validation")}
    assert (len(lines["train"]), len(lines["validation"])) == (20, 10)
    assert not list((tmp_path / "start").glob("*.partial"))
    assert not set(lines["train"]) & set(lines["validation"])
    assert (tmp_path / "start" / "model.safetensors").is_file()
    assert (tmp_path / "start" / "tokenizer.json").is_file()
    write_start(tmp_path / "start", [], held_out=10)
    assert len((tmp_path / "start" / "train.jsonl").read_text().splitlines()) == 20


def test_a_start_that_was_cut_short_is_made_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last file is the mark of all of it, so it appears in one piece."""
    records = [{"messages": [{"role": "user", "content": str(n)}]} for n in range(30)]
    write = Path.write_text

    def cut(self: Path, text: str, *arguments: Any, **options: Any) -> int:
        if not self.name.startswith("validation"):
            return write(self, text, *arguments, **options)
        write(self, text[:20], *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", cut)
        write_start(tmp_path / "start", records, held_out=10)
    write_start(tmp_path / "start", records, held_out=10)
    assert len((tmp_path / "start" / "validation.jsonl").read_text().splitlines()) == 10


def test_a_start_of_another_seed_is_refused(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
        return [{"messages": [{"role": "user", "content": str(n)}]} for n in range(300)]

    monkeypatch.setattr("whet_demo.start.resolve", lambda path: demonstrations)
    chosen, folder = demo(kit(), "sums"), tmp_path / "it"
    make_start(chosen, folder, seed=1)
    make_start(chosen, folder, seed=1)
    with pytest.raises(ConfigError, match="made from the seed 1, and --seed is 2; state --seed 1 to go on, or another"):
        make_start(chosen, folder, seed=2)
    (folder / "start" / "seed.txt").unlink()  # as an earlier version made it
    make_start(chosen, folder, seed=2)
    assert not (folder / "start" / "seed.txt").exists()
