"""Learn by each recipe of a list, from a saved start, and show in a table and a plot how far each one got.

    python benchmarks/learn.py                 all of them
    python benchmarks/learn.py grpo dapo       these
    python benchmarks/learn.py dpo --seeds 0 1 once with each seed
    python benchmarks/learn.py grpo --generators hf vllm=NAME sglang=/PATH/python
                                               once with each generator, in the Python that is named, if one is
    python benchmarks/learn.py --draw          none: table and plot of the runs that are there

Each takes at most three minutes on two cores. A start is made once and kept in models/. The runs are in
runs/learn/NAME, one that is there is made again; beside them are learn.md, learn.json and learn.png. Exits with 1
if one did not improve.

To add a recipe, add a line to ENTRIES, and if it begins from something new a start to STARTS.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from attrs import asdict, frozen

RUNS = Path("runs/learn")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5d3a9b", "#4d4d4d")
"""Told apart by colour-blind readers too (Okabe and Ito 2008)."""
GRADED = Path(os.environ.get("WHET_SHARED_DATA", "../shared/data")) / "gsm8k_model_solutions.jsonl"
"""Graded solutions to make preferences of; where there are none, sums are made up."""
PREFERENCES = [sys.executable, "examples/preference/prepare.py", "models/preference-0"]
PREFERENCES += ["--solutions", str(GRADED)] * GRADED.is_file()
STARTS: dict[str, tuple[str, list[list[str]]]] = {
    "arithmetic": (
        "models/start-0/model",
        [
            [sys.executable, "-m", "whet", "demo", "--folder", "runs/quickstart-0", "--steps", "0"],
            [sys.executable, "-m", "whet", "run", "recipes/quickstart-sft.yaml", "run.folder=models/start-0"],
        ],
    ),
    "experts": (
        "models/experts-0/model",
        [
            [sys.executable, "-m", "whet", "demo", "--folder", "runs/quickstart-0", "--steps", "0"],
            [
                sys.executable,
                "examples/quickstart/make_experts.py",
                "runs/quickstart-0/start",
                "models/experts-0/start",
            ],
            [sys.executable, "-m", "whet", "run", "recipes/learn-moe-sft.yaml"],
        ],
    ),
    "teacher": (
        "models/teacher-0/model",
        [
            [
                sys.executable,
                "-m",
                "whet",
                "run",
                "recipes/quickstart-grpo.yaml",
                "model.path=models/start-0/model",
                "run.folder=models/teacher-0",
            ]
        ],
    ),
    "puzzle": (
        "runs/sliding-puzzle-0/sft/model",
        [
            [
                sys.executable,
                "-m",
                "whet",
                "demo",
                "sliding-puzzle",
                "--folder",
                "runs/sliding-puzzle-0",
                "--steps",
                "0",
            ],
            [sys.executable, "-m", "whet", "run", "recipes/sliding-puzzle-sft.yaml"],
        ],
    ),
    "demonstrations": ("models/preference-0/validation.jsonl", [PREFERENCES]),
    "preferences": (
        "models/start-preference-0/model",
        [
            PREFERENCES,
            [sys.executable, "-m", "whet", "run", "recipes/learn-sft.yaml", "run.folder=models/start-preference-0"],
        ],
    ),
    "judge": (
        "models/start-judge-0/model",
        [
            PREFERENCES,
            [sys.executable, "-m", "whet", "run", "recipes/learn-sft.yaml", "run.folder=models/start-preference-0"],
            [sys.executable, "-m", "whet", "run", "recipes/learn-rm.yaml", "run.folder=models/start-judge-0"],
        ],
    ),
}
"""What recipes begin from: what is there once it is made, and the commands that make it."""

ACCURACY = "validation/rewards/accuracies"


@frozen
class Entry:
    """One recipe, and by what it is judged."""

    name: str
    """What it is called on the command line, in the table and in the plot."""
    recipe: str
    """Its file; the run goes to runs/learn/NAME."""
    metric: str = "evaluation/arithmetic/reward"
    """Of the held-out data, in metrics.jsonl. The first value is the start, the last one the end."""
    label: str = "held-out accuracy, arithmetic"
    """What the metric is; those with one label share a panel of the plot."""
    rises: bool = True
    """Whether more of it is better."""
    start: str = "arithmetic"
    """Of `STARTS`; several that build on each other joined by `+`; empty: it needs none."""


ENTRIES = (
    Entry("grpo", "recipes/learn-grpo.yaml"),
    Entry("grpo-lora", "recipes/learn-grpo-lora.yaml"),
    Entry("grpo-megatron", "recipes/learn-grpo-megatron.yaml"),
    Entry("dapo", "recipes/learn-dapo.yaml"),
    Entry("gspo", "recipes/learn-gspo.yaml"),
    Entry("cispo", "recipes/learn-cispo.yaml"),
    Entry("rloo", "recipes/learn-rloo.yaml"),
    Entry("reinforce-plus-plus", "recipes/learn-reinforce-plus-plus.yaml"),
    Entry("ppo", "recipes/learn-ppo.yaml"),
    Entry("moe", "recipes/learn-moe.yaml", start="experts"),
    Entry("distill", "recipes/learn-distill.yaml", start="arithmetic+teacher"),
    Entry("sft", "recipes/learn-sft.yaml", "validation/loss", "held-out loss", rises=False, start="demonstrations"),
    *(
        Entry(name, f"recipes/learn-{name}.yaml", ACCURACY, "held-out preference accuracy", start="preferences")
        for name in ("dpo", "ipo", "kto", "kto-unpaired", "rm")
    ),
    Entry(
        "sliding-puzzle",
        "recipes/sliding-puzzle-grpo.yaml",
        "evaluation/sliding-puzzle/reward",
        "puzzles solved",
        start="puzzle",
    ),
    Entry("judge", "recipes/learn-judge.yaml", "evaluation/judge/judge", "score by the reward model", start="judge"),
)


@frozen
class Result:
    """How far a recipe got."""

    name: str
    label: str
    rises: bool
    steps: list[int]
    values: list[float]
    seconds: float | None
    """On the clock, the start not counted; None where only the run's files were read."""
    processor_seconds: float | None

    @property
    def improved(self) -> bool:
        """Whether the end is better than the start."""
        return (self.values[-1] > self.values[0]) == self.rises and self.values[-1] != self.values[0]


@frozen
class Choice:
    """An entry as it is run: with which seed, and on which generator."""

    entry: Entry
    seed: int = 0
    generator: str = ""
    """As on the command line, `NAME` or `NAME=PYTHON`; empty: the recipe's."""

    @property
    def folder(self) -> Path:
        """Where the run lies."""
        used = self.generator.partition("=")[0]
        parts = [self.entry.name, *([used] if used else []), *([f"seed-{self.seed}"] if self.seed else [])]
        return RUNS / "-".join(parts)

    @property
    def overrides(self) -> list[str]:
        """What is said on the command line beside the recipe."""
        used, _, python = self.generator.partition("=")
        said = [f"run.folder={self.folder}", f"run.seed={self.seed}"]
        said += [f"generator.use={used}"] if used else []
        return [*said, *([f"cluster.python.generator={python}"] if python else [])]


def main(arguments: Sequence[str]) -> int:
    """Learn, write the table and the plot, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *(entry.name for entry in ENTRIES)], metavar="NAME")
    parser.add_argument("--draw", action="store_true", help="run nothing; show the runs that are there")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the runs; starts are made with seed 0")
    parser.add_argument("--generators", nargs="+", default=[""], metavar="NAME[=PYTHON]", help="what samples")
    options = parser.parse_args(arguments)
    chosen = [
        Choice(entry, seed, generator)
        for entry in ENTRIES if not options.names or entry.name in options.names
        for seed in options.seeds for generator in options.generators
    ]  # fmt: skip
    if options.draw:
        results = [read(choice) for choice in chosen if (choice.folder / "metrics.jsonl").is_file()]
    else:
        results = [learn(choice) for choice in chosen]
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / "learn.json").write_text(json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8")
    (RUNS / "learn.md").write_text(table(results), encoding="utf-8")
    draw(results, RUNS / "learn.png")
    print(f"{table(results)}\nplot: {RUNS / 'learn.png'}")
    return int(not all(result.improved for result in results))


def learn(choice: Choice) -> Result:
    """Make the start where it is missing, run the recipe anew, and read how it went."""
    for start in filter(None, choice.entry.start.split("+")):
        made, commands = STARTS[start]
        for command in commands if not Path(made).exists() else ():
            subprocess.run(command, check=True)
    shutil.rmtree(choice.folder, ignore_errors=True)
    began, before = time.perf_counter(), children_seconds()
    subprocess.run([sys.executable, "-m", "whet", "run", choice.entry.recipe, *choice.overrides], check=True)
    return read(choice, time.perf_counter() - began, children_seconds() - before)


def children_seconds() -> float:
    """Return the processor time of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read(choice: Choice, seconds: float | None = None, processor_seconds: float | None = None) -> Result:
    """Read the metric's course from a run's folder."""
    folder, metric = choice.folder, choice.entry.metric
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if metric in row]
    if len(rows) < 2:
        raise SystemExit(f"{folder} has {metric!r} {len(rows)} times, wanted it at start and end")
    steps, values = [row["step"] for row in rows], [row[metric] for row in rows]
    return Result(folder.name, choice.entry.label, choice.entry.rises, steps, values, seconds, processor_seconds)


def table(results: Sequence[Result]) -> str:
    """Write a row for each recipe."""
    lines = [
        "| recipe | measured | start | end | steps | seconds | processor seconds |",
        "| --- | --- " + "| ---: " * 5 + "|",
    ]
    for one in results:
        seconds = " | ".join("" if value is None else f"{value:.0f}" for value in (one.seconds, one.processor_seconds))
        ends = f"{one.values[0]:.3f} | {one.values[-1]:.3f}{'' if one.improved else ' (no better)'}"
        lines.append(f"| {one.name} | {one.label} | {ends} | {one.steps[-1]} | {seconds} |")
    return "\n".join(lines) + "\n"


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw a panel for each label, with a line for each recipe."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    labels = list(dict.fromkeys(result.label for result in results))
    figure, axes = pyplot.subplots(
        1, len(labels), figsize=(6.4 * len(labels), 4.4), squeeze=False, layout="constrained"
    )
    for axis, label in zip(axes[0], labels, strict=True):
        axis.set_prop_cycle(color=COLOURS)
        for one in (result for result in results if result.label == label):
            (line,) = axis.plot(one.steps, one.values, marker="o", markersize=3.5, linewidth=1.6)
            line.set_label(f"{one.name}: {one.values[0]:.3f} to {one.values[-1]:.3f}")
        axis.set(xlabel="step", title=label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
