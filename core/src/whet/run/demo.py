"""Runs a demo: makes a small model and its data, writes the recipes beside them, runs these one after the other.

    start/  a random model with its tokenizer, train.jsonl, validation.jsonl
    NAME.yaml  each recipe, with its paths in this folder
    sft/, grpo/, ...  the run of each

Whatever is there already is used, so the same command goes on where it was ended.
"""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from whet.component import resolve
from whet.data import small_models
from whet.data.files import read_metrics
from whet.errors import ConfigError, WhetError
from whet.plan.load import Loaded, load_config
from whet.plugins.catalog import catalog, install_words
from whet.plugins.registry import Registry
from whet.plugins.shipped import Demo, rebased, recipe
from whet.run.run_folder import RunFolder

RECORDS = 40_000
"""Demonstrations to train on."""
HELD_OUT = 256
SEED = "seed.txt"
"""The file in `start` that holds the seed of its model and data."""
MODULES = ("torch", "transformers", "safetensors")
"""Needed to make the model; core does not install them."""


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


def make_start(demo: Demo, folder: Path, seed: int = 0) -> None:
    """Make model and data of a demo where they are not there.

    Raises `WhetError` where that needs what is not here, and where they are there and were made from another seed.
    """
    _refuse_another_seed(folder, seed)
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        known = catalog().demos.get(demo.name)
        command = catalog().command(known) if known else install_words(missing)
        raise WhetError(f"making the model needs {' and '.join(missing)}, which this Python lacks: {command}")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    records: Callable[..., object] = resolve(demo.demonstrations)
    given = records(RECORDS + HELD_OUT, seed=seed)
    if not small_models.has_start(folder / "start"):
        (folder / "start").mkdir(parents=True, exist_ok=True)
        (folder / "start" / SEED).write_text(f"{seed}\n", encoding="utf-8")
    small_models.make_start(folder / "start", given, held_out=HELD_OUT, seed=seed)  # type: ignore[arg-type] # of a plugin


def _refuse_another_seed(folder: Path, seed: int) -> None:
    """Raise `ConfigError` where the model and data that are there were made from another seed."""
    made = folder / "start" / SEED
    with suppress(FileNotFoundError, ValueError):
        if (found := int(made.read_text(encoding="utf-8"))) != seed:
            raise ConfigError(
                f"{folder / 'start'}: its model and data were made from the seed {found}, and --seed is {seed}; state "
                f"--seed {found} to go on, or another --folder to begin from {seed}"
            )


def course(run: Path) -> Course | None:
    """Read how the held-out reward of a run went, or else the loss on held-out data."""
    rows = list(read_metrics(run / "metrics.jsonl"))
    names = dict.fromkeys(name for _, row in rows for name in row)
    rewards = [name for name in names if name.startswith("evaluation/") and name.endswith("/reward")]
    for name in [*rewards, "validation/loss"]:
        if values := tuple((step, row[name]) for step, row in rows if name in row):
            return Course(name, values)
    return None
