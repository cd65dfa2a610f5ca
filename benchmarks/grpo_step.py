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
import time
from pathlib import Path

HERE = Path(__file__).parent
START = Path("runs/bench/sft")
PHASES = ("backend.forward", "backend.backward", "backend.optimizer", "generator.generate")


def main() -> None:
    """Run both in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    prepare()
    ratios, starts = [], []
    for number in range(1, args.rounds + 1):
        steps, peer_start = trl(args)
        rows, own_start = ours(args)
        peer, rows = steps[args.skip :], rows[args.skip :]
        own = [row["seconds/step"] for row in rows]
        starts.append(own_start / peer_start)
        ratio = statistics.median(own) / statistics.median(peer)
        ratios.append(ratio)
        print(
            f"round {number}: whet {statistics.median(own):.3f} s/step (least {min(own):.3f}), "
            f"TRL {statistics.median(peer):.3f} s/step (least {min(peer):.3f}), ratio {ratio:.2f}; from the command to "
            f"the end of the first step: {own_start:.1f} s against {peer_start:.1f} s",
            flush=True,
        )
    print(f"ratio of a step, median of {args.rounds} rounds: {statistics.median(ratios):.2f}")
    print(f"ratio of the time to the end of the first step: {statistics.median(starts):.2f}")
    print(f"of a step of whet neither forward, backward, optimizer nor generation: {statistics.median(rest(rows)):.1%}")
    print("phases of a step of whet, medians of the last round, in ms:")
    for name in sorted({key for row in rows for key in row if key.startswith("seconds/")}):
        print(
            f"  {name.removeprefix('seconds/'):28s} {1000 * statistics.median(row.get(name, 0.0) for row in rows):8.1f}"
        )


def rest(rows: list[dict[str, float]]) -> list[float]:
    """Return the share of each step that is none of the phases in which a model computes."""
    return [1 - sum(row[f"seconds/{phase}"] for phase in PHASES) / row["seconds/step"] for row in rows]


def prepare() -> None:
    """Warm the model up once; both start from it."""
    if (START / "model").exists():
        return
    run("whet", "demo", "--folder", "models/bench", "--steps", "0")
    data = "models/bench/start"
    run(
        "whet", "run", "recipes/quickstart-sft.yaml", f"run.folder={START}", f"model.path={data}",
        f"data.train.0.path={data}/train.jsonl", f"data.validation.0.path={data}/validation.jsonl",
    )  # fmt: skip


def ours(args: argparse.Namespace, *overrides: str) -> tuple[list[dict[str, float]], float]:
    """Train with whet; give the metrics of each step, and the seconds until the end of the first."""
    folder = Path("runs/bench/whet")
    shutil.rmtree(folder, ignore_errors=True)
    began = time.time()
    run(
        "whet", "run", "recipes/quickstart-grpo.yaml", f"run.folder={folder}", f"model.path={START}/model",
        f"run.steps={args.steps}", "run.save_every=0", "run.export=false", "evaluation.environments=[]",
        "backend.schedule={kind: constant, warmup_steps: 3}", "loggers=[]",
        f"cluster.threads={{backend: {args.threads}, generator: {args.threads}}}", *overrides,
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, rows[0]["time"] - began


def trl(args: argparse.Namespace, *options: str) -> tuple[list[float], float]:
    """Train with TRL; give the seconds of each step, and those until the end of the first."""
    words = [f"{START}/model", "--steps", str(args.steps), "--threads", str(args.threads), *options]
    began = time.time()
    told = json.loads(run(sys.executable, str(HERE / "trl_grpo.py"), *words).splitlines()[-1])
    return [float(s) for s in told["seconds"]], told["first"] - began


def run(*command: str) -> str:
    """Run a command and give what it printed; its errors are shown."""
    # What is compiled is kept, as on a user's machine.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**kept, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
