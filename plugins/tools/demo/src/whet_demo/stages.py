"""Runs a demo: makes a small model and its data, writes the recipes beside them, runs these one after the other.

    start/  a random model with its tokenizer, train.jsonl, validation.jsonl
    NAME.yaml  each recipe, with its paths in this folder
    sft/, grpo/, ...  the run of each

Whatever is there already is used, so the same command goes on where it was ended.
"""

from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from whet.data.files import read_metrics
from whet.errors import ConfigError
from whet.plan.load import Loaded, load_config
from whet.plugins.registry import Registry
from whet.run.run_folder import RunFolder
from whet_demo.demos import Demo, rebased
from whet_start.recipes import recipe


@frozen
class Stage:
    """One recipe of a demo, as it is run."""

    recipe: Path
    overrides: tuple[str, ...]
    folder: Path
    steps: int


@frozen
class Course:
    """What became of one measure in a run."""

    metric: str
    values: tuple[tuple[int, float], ...]
    """By step."""


def stages(demo: Demo, folder: Path, registry: Registry, steps: int | None = None, seed: int = 0) -> list[Stage]:
    """Write the recipes of a demo into its folder and load them. Raises `ConfigError` for what is not installed.

    `steps` are those of the last run; the others are shortened alike.
    """
    written = [_written(demo, name, folder, registry) for name in demo.recipes]
    seeded = [f"run.seed={seed}"] if seed else []
    found = [load_config(path, seeded, registry) for path in written]
    share = 1.0 if steps is None else steps / _steps(written[-1], found[-1])
    return [_stage(path, loaded, share, seeded) for path, loaded in zip(written, found, strict=True)]


def _stage(path: Path, loaded: Loaded, share: float, seeded: Sequence[str]) -> Stage:
    run, planned = loaded.config.run, _steps(path, loaded)
    steps = max(1, round(planned * share))
    changed = [f"run.steps={steps}"] if steps != planned else []
    return Stage(path, (*seeded, *changed), Path(run.folder), steps)


def refuse_shorter(runs: Sequence[Stage]) -> None:
    """Raise `ConfigError` where a run would be prolonged that a later run of the demo has begun from."""
    begun = [stage for stage in runs if RunFolder(stage.folder).has_steps()]
    for stage in begun[:-1]:
        done = max((step for step, _ in read_metrics(stage.folder / "metrics.jsonl")), default=0)
        if done < stage.steps:
            later = begun[-1].folder
            raise ConfigError(
                f"{later} was trained from {stage.folder} after {done} steps, which this demo would prolong to "
                f"{stage.steps}; delete {later}, or choose another --folder"
            )


def _steps(path: Path, loaded: Loaded) -> int:
    if loaded.config.run.steps is None:
        raise ConfigError(f"{path}: run.steps is missing; the recipe of a demo states it, and not run.epochs")
    return loaded.config.run.steps


def _written(demo: Demo, name: str, folder: Path, registry: Registry) -> Path:
    """Write a recipe with its paths in the demo's folder; one that is there already is kept as it is."""
    path = folder / f"{name}.yaml"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        text = recipe(registry, name).path.read_text(encoding="utf-8")
        path.write_text(rebased(text, demo.folder, folder.as_posix()), encoding="utf-8")
    return path


def course(run: Path) -> Course | None:
    """Read how the held-out reward of a run went, or else the loss on held-out data."""
    rows = list(read_metrics(run / "metrics.jsonl"))
    names = dict.fromkeys(name for _, row in rows for name in row)
    rewards = [name for name in names if name.startswith("evaluation/") and name.endswith("/reward")]
    for name in [*rewards, "validation/loss"]:
        if values := tuple((step, row[name]) for step, row in rows if name in row):
            return Course(name, values)
    return None
