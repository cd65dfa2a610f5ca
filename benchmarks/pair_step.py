"""Measure a step on pairs of whet against TRL's: same model, pairs, sizes and threads, in turn.

    nox -s bench                                       among others, three rounds of twelve steps of each
    python benchmarks/pair_step.py dpo                 DPO against DPOTrainer
    python benchmarks/pair_step.py dpo --precomputed   with the reference scored beforehand, by both
    python benchmarks/pair_step.py rm                  a reward model against RewardTrainer

TRL is set as is fastest for a model this small on a CPU: float32, no gradient checkpointing. With DPO both score each
batch with the reference as it comes, unless `--precomputed` is given. The first steps of each run are left out. Ratios
are of medians, within a round. The losses of the first and the last step are printed for both; the order of pairs
differs, and so do new heads.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from grpo_step import HERE, START, prepare, run

PAIRS = Path("models/bench/pairs.jsonl")


def main() -> None:
    """Run both in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["dpo", "rm"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="pairs of a step")
    parser.add_argument("--precomputed", action="store_true", help="of dpo: score all pairs with the reference before")
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
    print(f"ratio of a step of {args.kind}, median of {args.rounds} rounds: {statistics.median(ratios):.2f}")
    print(f"losses of the first and the last step: whet {rows[0]['loss']:.4f} {rows[-1]['loss']:.4f}, "
          f"TRL {peer_losses[0]:.4f} {peer_losses[-1]:.4f}")  # fmt: skip


def make_pairs(count: int) -> None:
    """Write pairs: worked sums against a wrong result."""
    from whet_env_math.arithmetic import Arithmetic
    from whet_env_math.config import ArithmeticConfig

    rng, tasks = random.Random(0), Arithmetic(ArithmeticConfig()).tasks("train")
    with PAIRS.open("w", encoding="utf-8") as file:
        for i in range(count):
            prompt, answer = tasks[i].prompt[0].text, int(tasks[i].data["answer"])
            good, bad = worked(prompt, answer), answer + rng.choice((-2, -1, 1, 2))
            pair = {"prompt": prompt, "chosen": good, "rejected": rf"The answer is \boxed{{{bad}}}."}
            file.write(json.dumps(pair) + "\n")


def worked(prompt: str, answer: int) -> str:
    """Write an answer of a few steps, as long as those of the warm start."""
    terms = prompt.removeprefix("Compute ").removesuffix(".")
    return rf"{terms}={answer}, so {terms}={answer}. \boxed{{{answer}}}"


def ours(args: argparse.Namespace) -> tuple[list[dict[str, float]], float]:
    """Train with whet; give the metrics of each step, and the seconds until the end of the first."""
    folder, recipe = Path(f"runs/bench/whet-{args.kind}"), Path(f"runs/bench/{args.kind}.yaml")
    shutil.rmtree(folder, ignore_errors=True)
    algorithm, backend = of_kind(args)
    document = {
        "run": {"folder": str(folder), "steps": args.steps, "export": False},
        "model": {"path": f"{START}/model"},
        "algorithm": {"use": args.kind, "batch_size": args.batch, **algorithm},
        "backend": {
            "use": "fsdp2",
            "optimizer": {"lr": 1.0e-4, "betas": [0.9, 0.99]},
            "schedule": {"warmup_steps": 3},
            **backend,
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


def of_kind(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys of algorithm and backend that are those of one kind alone."""
    if args.kind == "rm":
        return {}, {"head": "value"}
    return {"reference": "precomputed" if args.precomputed else "on-the-fly"}, {"reference": not args.precomputed}


def trl(args: argparse.Namespace) -> tuple[list[float], list[float], float]:
    """Train with TRL; give the seconds and the loss of each step, and the seconds until the end of the first."""
    words = [args.kind, f"{START}/model", str(PAIRS), "--steps", str(args.steps), "--threads", str(args.threads)]
    words += ["--batch", str(args.batch), *["--precomputed"] * args.precomputed]
    began = time.time()
    told = json.loads(run(sys.executable, str(HERE / "trl_pairs.py"), *words).splitlines()[-1])
    return [float(s) for s in told["seconds"]], told["losses"], told["first"] - began


if __name__ == "__main__":
    main()
