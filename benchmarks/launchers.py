"""Measure a GRPO step under the launchers `local` and `ray`, one trainer and one generator with a thread each, in turn.

    python benchmarks/launchers.py       what Ray costs a step, and how long it is from the command to the first one

Both roles have a process of their own. The first steps of each run are left out: for some ten seconds Ray's processes
are still busy with their own start.
"""

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path

from grpo_step import START, prepare, rest, run

LAUNCHERS = ("local", "ray")


def main() -> None:
    """Run both in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip", type=int, default=20)
    args = parser.parse_args()
    prepare()
    ratios, shares = [], []
    for number in range(1, args.rounds + 1):
        seconds, starts, parts = {}, {}, {}
        for launcher in LAUNCHERS:
            rows, starts[launcher] = measure(launcher, args.steps)
            parts[launcher] = told(rows[0])
            rows = rows[args.skip :]
            seconds[launcher] = statistics.median(row["seconds/step"] for row in rows)
        ratios.append(seconds["ray"] / seconds["local"])
        shares.append(statistics.median(rest(rows)))
        print(
            f"round {number}: ray {seconds['ray']:.3f} s/step, local {seconds['local']:.3f} s/step, ratio "
            f"{ratios[-1]:.3f}; from the command to the end of the first step: {starts['ray']:.1f} s against "
            f"{starts['local']:.1f} s; under Ray neither forward, backward, optimizer nor generation: {shares[-1]:.1%}",
            flush=True,
        )
        for launcher in LAUNCHERS:
            print(f"  first step, {launcher}: {parts[launcher]}", flush=True)
    print(f"ratio of a step under Ray to one without, median of {args.rounds} rounds: {statistics.median(ratios):.3f}")
    print(f"neither forward, backward, optimizer nor generation, median: {statistics.median(shares):.1%}")


def measure(launcher: str, steps: int) -> tuple[list[dict[str, float]], float]:
    """Return the metrics of each step, and the seconds until the end of the first."""
    folder = Path(f"runs/bench/on-{launcher}")
    shutil.rmtree(folder, ignore_errors=True)
    began = time.time()
    run(
        "whet", "run", "recipes/quickstart-grpo.yaml", f"run.folder={folder}", f"model.path={START}/model",
        f"run.steps={steps}", "run.save_every=0", "run.export=false", "evaluation.environments=[]", "loggers=[]",
        f"cluster={{launcher: {launcher}, colocate: [], threads: {{backend: 1, generator: 1}}}}",
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, rows[0]["time"] - began


def told(row: dict[str, float]) -> str:
    """List the parts of the time to the first step, in the order in which they were over."""
    inside = "seconds/startup."
    return ", ".join(f"{name.removeprefix(inside)} {row[name]:.1f}" for name in row if name.startswith(inside))


if __name__ == "__main__":
    main()
