"""What is mutated: recipes of the repository on a tiny model, data files, and one small run with its checkpoints."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from whet.config.structure import unstructure
from whet.plan.prepare import prepare
from whet.plugins.registry import Registry, load_plugins
from whet_start.small_models import make_model, make_tokenizer

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
STEPS = 2
"""Of the small run, which has a checkpoint after each."""

DEMONSTRATIONS: Sequence[Mapping[str, Any]] = [
    {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"It is {n}."}]}
    for n in range(6)
] + [
    {"prompt": "Say 7.", "completion": "It is 7."},
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Say 8."}]}], "completion": "It is 8."},
    {"text": "Say 9 and 12."},
    {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say 2."},
                  {"role": "assistant", "content": "2"}, {"role": "user", "content": "Again."},
                  {"role": "assistant", "content": "2"}]},
]  # fmt: skip
PAIRS: Sequence[Mapping[str, Any]] = [
    {"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": f"It is {n + 1}."} for n in range(8)
] + [
    {"chosen": [{"role": "user", "content": "Say 2."}, {"role": "assistant", "content": "2"}],
     "rejected": [{"role": "user", "content": "Say 2."}, {"role": "assistant", "content": "3"}]},
]  # fmt: skip
DATA = {"demonstrations": DEMONSTRATIONS, "pairs": PAIRS}
"""Records by the way in which they are read."""

OF_RECIPES = {
    "learn-sft": "demonstrations",
    "learn-dpo": "pairs",
    "learn-rm": "pairs",
    "learn-kto": "pairs",
    "learn-ppo": "",
    "learn-dapo": "",
    "learn-cispo": "",
    "learn-gspo": "",
    "learn-reinforce-plus-plus": "",
    "learn-distill": "",
    "learn-judge": "",
    "calculator-grpo": "",
    "quickstart-async": "",
}
"""Recipes that are mutated, with the data that they need."""


@frozen
class Base:
    """A config that holds."""

    name: str
    document: Mapping[str, Any]
    """With every key that it can have, defaults included."""


@frozen
class Ground:
    """All that cases are made from. It is made once, and every case changes a copy."""

    folder: Path
    model: Path
    bases: Sequence[Base]
    run: Path
    """The folder of a run that has taken all its steps."""
    registry: Registry = field(repr=False)

    def data(self, kind: str) -> Path:
        """Return the data file of a kind."""
        return self.folder / f"{kind}.jsonl"


def make_ground(folder: Path, model: Path | None = None) -> Ground:
    """Make everything in a folder. `model` is a tiny model that is there already."""
    folder.mkdir(parents=True, exist_ok=True)
    registry = load_plugins()
    if model is None:
        model = make_model(folder / "model", make_tokenizer(["Say 1, 2 and 12. It is 7."] * 20))
    for kind, records in DATA.items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    bases = [_base(name, kind, folder, model, registry) for name, kind in OF_RECIPES.items()]
    return Ground(folder, model, bases, _small_run(folder, model), registry)


def _base(name: str, kind: str, folder: Path, model: Path, registry: Registry) -> Base:
    overrides = [f"model.path={model}", f"run.folder={folder / 'never'}", "run.steps=9"]
    if kind:
        overrides += [f"data.{part}=[{{path: {folder / kind}.jsonl}}]" for part in ("train", "validation")]
    for role in ("teacher", "judge"):
        if name == f"learn-{'distill' if role == 'teacher' else role}":
            overrides.append(f"roles.{role}.model.path={model}")
    loaded = prepare(RECIPES / f"{name}.yaml", overrides, registry=registry).loaded
    return Base(name, unstructure(loaded.config))


def run_config(folder: Path, run: Path, model: Path, **sections: Any) -> dict[str, Any]:
    """Return the config of the small run."""
    return {
        "run": {"folder": str(run), "steps": STEPS, "save_every": 1, "keep": 0, "export": False},
        "model": {"path": str(model)},
        "algorithm": {"use": "sft", "batch_size": 2},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}},
        "data": {"train": [{"path": str(folder / "demonstrations.jsonl")}]},
        "cluster": {"workers": "inline", "threads": {"backend": 1}},
        **sections,
    }


def _small_run(folder: Path, model: Path) -> Path:
    from whet.run.compose import run

    (folder / "run.yaml").write_text(json.dumps(run_config(folder, folder / "run", model)))
    run(folder / "run.yaml")
    _add_episodes(folder / "run")
    return folder / "run"


def _add_episodes(run: Path) -> None:
    """Add the files that a run on rollouts has, so that a report has something to read."""
    sequence = {"tokens": [1, 2, 3], "prompt_length": 1, "loss_mask": [0, 1, 1], "pieces": ["a", "b", "c"],
                "versions": [-1, 0, 0], "sampler_logprobs": [0.0, -1.0, -2.0], "trainer_logprobs": [0.0, -1.1, -2.0],
                "columns": {"advantages": [0.0, 0.5, 0.5]}}  # fmt: skip
    for step in range(1, STEPS + 1):
        rows = [
            {"group": group, "sample": sample, "task": group, "environment": "sums", "reward": 1.0, "turns": 1,
             "rewards": {"correct": 1.0}, "versions": [step - 1, step - 1], "response_length": 2, "stop": "stop",
             "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
             "sequences": [sequence]}
            for group in range(2) for sample in range(2)
        ]  # fmt: skip
        text = "".join(json.dumps(row) + "\n" for row in rows)
        for name in (f"rollouts/step-{step:06d}.jsonl", f"evaluations/step-{step:06d}-sums.jsonl"):
            (run / name).parent.mkdir(exist_ok=True)
            (run / name).write_text(text)
        tasks = run / "evaluations" / "tasks" / f"step-{step:06d}-sums.jsonl"
        tasks.parent.mkdir(exist_ok=True)
        tasks.write_text(json.dumps({"task": 0, "reward": 1.0}) + "\n")


def copy_of_run(ground: Ground, folder: Path) -> Path:
    """Copy the small run, so that it can be changed."""
    return shutil.copytree(ground.run, folder / "run")
