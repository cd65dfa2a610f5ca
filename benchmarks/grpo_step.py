"""Measure a GRPO step of whet against TRL's GRPOTrainer: same model, problems, sizes and threads, in turn.

    nox -s bench                      three rounds of twelve steps each
    nox -s bench -- --rounds 5        more rounds

TRL is set as is fastest for a model this small on a CPU: float32, no gradient checkpointing. The first
steps of each run are left out. Ratios are of medians, within a round.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
START = Path("runs/bench/sft")
PHASES = ("rollout.take", "backend.train", "backend.refit")


def main() -> None:
    """Run both in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    prepare()
    ratios = []
    for number in range(1, args.rounds + 1):
        peer = trl(args)[args.skip :]
        rows = ours(args)[args.skip :]
        own = [row["seconds/step"] for row in rows]
        ratio = statistics.median(own) / statistics.median(peer)
        ratios.append(ratio)
        print(
            f"round {number}: whet {statistics.median(own):.3f} s/step (least {min(own):.3f}), "
            f"TRL {statistics.median(peer):.3f} s/step (least {min(peer):.3f}), ratio {ratio:.2f}",
            flush=True,
        )
    print(f"ratio of a step, median of {args.rounds} rounds: {statistics.median(ratios):.2f}")
    print("phases of a step of whet, medians of the last round, in ms:")
    for name in sorted({key for row in rows for key in row if key.startswith("seconds/")}):
        print(
            f"  {name.removeprefix('seconds/'):28s} {1000 * statistics.median(row.get(name, 0.0) for row in rows):8.1f}"
        )


def prepare() -> None:
    """Warm the model up once; both start from it."""
    if (START / "model").exists():
        return
    run(sys.executable, "examples/quickstart/prepare.py", "models/bench")
    data = "models/bench"
    run(
        "whet", "run", "recipes/quickstart-sft.yaml", f"run.folder={START}", f"model.path={data}",
        f"data.train.0.path={data}/train.jsonl", f"data.validation.0.path={data}/validation.jsonl",
    )  # fmt: skip


def ours(args: argparse.Namespace) -> list[dict[str, float]]:
    """Train with whet; give the metrics of each step."""
    folder = Path("runs/bench/whet")
    shutil.rmtree(folder, ignore_errors=True)
    run(
        "whet", "run", "recipes/quickstart-grpo.yaml", f"run.folder={folder}", f"model.path={START}/model",
        f"run.steps={args.steps}", "run.save_every=0", "run.export=false", "evaluation.environments=[]",
        "backend.schedule={kind: constant, warmup_steps: 3}", "loggers=[]",
        f"cluster.threads={{backend: {args.threads}, generator: {args.threads}}}",
    )  # fmt: skip
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trl(args: argparse.Namespace) -> list[float]:
    """Train with TRL; give the seconds of each step."""
    words = [f"{START}/model", "--steps", str(args.steps), "--threads", str(args.threads)]
    output = run(sys.executable, str(HERE / "trl_grpo.py"), *words)
    return [float(s) for s in json.loads(output.splitlines()[-1])["seconds"]]


def run(*command: str) -> str:
    """Run a command and give what it printed; its errors are shown."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
