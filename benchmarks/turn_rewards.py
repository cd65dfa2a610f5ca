"""Compare rewards of turns with their sum over the episode, on a task of four turns with wishes of their own.

    python benchmarks/turn_rewards.py [--seeds 0 1 2] [--steps 24]

A random model plays four turns: two want even digits, two want odd digits. `turns` trains with a reward for each turn
(`turn-returns`, gamma 0), `episode` with their sum (`rloo`). Both begin with the same model and the same responses.
The runs, a table and a plot are in runs/turn-rewards. Takes two minutes on two cores.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

import whet
from whet.data.files import read_rows
from whet_start.small_models import make_model, make_tokenizer

RUNS = Path("runs/turn-rewards")
METHODS = {
    "turns": (True, {"use": "turn-returns", "gamma": 0.0}),
    "episode": (False, {"use": "rloo"}),
}


def train(folder: Path, model: Path, method: str, seed: int, steps: int) -> list[float]:
    """Train from a random model, and return the mean reward of an episode after each step."""
    per_turn, advantages = METHODS[method]
    folder.mkdir(parents=True)
    document = {
        "run": {"folder": str(folder / "run"), "steps": steps, "seed": seed, "save_every": 0, "export": False},
        "model": {"path": str(model)},
        "algorithm": {"use": "grpo", "prompts_per_step": 4, "group_size": 8, "advantages": advantages},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 3.0e-3}},
        "generator": {"use": "hf"},
        "rollout": {"max_tokens": 8},
        "cluster": {"workers": "inline"},
        "environments": [{"use": "turns", "per_turn": per_turn}],
        "plugins": [str(Path("tests/addressed.py").resolve())],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    with whet.open(folder / "run.yaml") as parts:
        parts.algorithm.run(parts)
    return [row["reward/wished"] for row in read_rows(folder / "run" / "metrics.jsonl") if "reward/wished" in row]


def draw(found: dict[str, list[list[float]]], path: Path) -> None:
    """Draw the mean over seeds, and each seed as a thin line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for (name, curves), colour in zip(found.items(), ("#0072b2", "#d55e00"), strict=True):
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.25, linewidth=1)
        means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        axes.plot(
            range(1, len(means) + 1), means, color=colour, linewidth=2, label=f"reward of each {name.rstrip('s')}"
        )
    axes.set(xlabel="step", ylabel="reward of an episode (of 4)", title="Rewards of turns and of episodes")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=24)
    asked = parser.parse_args(arguments)
    RUNS.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=RUNS))
    model = make_model(scratch / "model", make_tokenizer(["Say 13579. Now 2468 and 1357.", "02468 13579"] * 20))
    found = {
        name: [train(scratch / f"{name}-{seed}", model, name, seed, asked.steps) for seed in asked.seeds]
        for name in METHODS
    }
    draw(found, RUNS / "turn-rewards.png")
    print(f"{'reward':10}" + "".join(f"step {step:<8}" for step in range(4, asked.steps + 1, 4)))
    for name, curves in found.items():
        means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        print(f"{name:10}" + "".join(f"{means[step - 1]:<13.3f}" for step in range(4, asked.steps + 1, 4)))


if __name__ == "__main__":
    main()
