"""Measure a step of a reward model of whet against TRL's RewardTrainer: same model, pairs, sizes and threads, in turn.

    nox -s bench                      among others, three rounds of twelve steps each
    python benchmarks/rm_step.py      this alone

TRL is set as is fastest for a model this small on a CPU: float32, no gradient checkpointing. The first steps of each
run are left out. Ratios are of medians, within a round. The losses of the first and the last step are printed for both;
the order of pairs and the new heads differ.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path

from dpo_step import PAIRS, make_pairs
from grpo_step import HERE, START, prepare, run


def main() -> None:
    """Run both in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="pairs of a step")
    args = parser.parse_args()
    prepare()
    make_pairs(args.steps * args.batch)
    ratios = []
    for number in range(1, args.rounds + 1):
        peer, peer_losses, peer_start = trl(args)
        rows, own_start = ours(args)
        own = [row["seconds/step"] for row in rows][args.skip :]
        ratios.append(statistics.median(own) / statistics.median(peer[args.skip :]))
        ms = [1000 * statistics.median(seconds) / args.batch for seconds in (own, peer[args.skip :])]
        print(
            f"round {number}: whet {ms[0]:.2f} ms a pair, TRL {ms[1]:.2f} ms a pair, ratio {ratios[-1]:.2f}; from the "
            f"command to the end of the first step: {own_start:.1f} s against {peer_start:.1f} s",
            flush=True,
        )
    print(f"ratio of a step of a reward model, median of {args.rounds} rounds: {statistics.median(ratios):.2f}")
    print(f"losses of the first and the last step: whet {rows[0]['loss']:.4f} {rows[-1]['loss']:.4f}, "
          f"TRL {peer_losses[0]:.4f} {peer_losses[-1]:.4f}")  # fmt: skip


def ours(args: argparse.Namespace) -> tuple[list[dict[str, float]], float]:
    """Train with whet; give the metrics of each step, and the seconds until the end of the first."""
    folder, recipe = Path("runs/bench/whet-rm"), Path("runs/bench/rm.yaml")
    shutil.rmtree(folder, ignore_errors=True)
    document = {
        "run": {"folder": str(folder), "steps": args.steps, "export": False},
        "model": {"path": f"{START}/model"},
        "algorithm": {"use": "rm", "batch_size": args.batch},
        "backend": {
            "use": "fsdp2",
            "head": "value",
            "optimizer": {"lr": 1.0e-4, "betas": [0.9, 0.99]},
            "schedule": {"warmup_steps": 3},
        },
        "data": {"train": [{"path": str(PAIRS)}]},
        "cluster": {"threads": {"backend": args.threads}},
        "loggers": [],
    }
    recipe.write_text(json.dumps(document), encoding="utf-8")
    began = time.time()
    run("whet", "run", str(recipe))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, rows[0]["time"] - began


def trl(args: argparse.Namespace) -> tuple[list[float], list[float], float]:
    """Train with TRL; give the seconds and the loss of each step, and the seconds until the end of the first."""
    words = [f"{START}/model", str(PAIRS), "--steps", str(args.steps), "--threads", str(args.threads)]
    began = time.time()
    told = json.loads(run(sys.executable, str(HERE / "trl_rm.py"), *words, "--batch", str(args.batch)).splitlines()[-1])
    return [float(s) for s in told["seconds"]], told["losses"], told["first"] - began


if __name__ == "__main__":
    main()
