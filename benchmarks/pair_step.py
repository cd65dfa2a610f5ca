"""Measure a step on pairs of whet against TRL's: same model, pairs, sizes and threads, in turn.

    nox -s bench                                       among others, three rounds of twelve steps of each
    python benchmarks/pair_step.py dpo                 DPO against DPOTrainer
    python benchmarks/pair_step.py dpo --precomputed   with the reference scored beforehand, by both
    python benchmarks/pair_step.py rm                  a reward model against RewardTrainer
    python benchmarks/pair_step.py rm --model FOLDER --pairs FILE --batch 16
                                                       the same with a model and pairs of your own

Without `--pairs` the pairs are short: a sum of 23 tokens, a right answer of 40 tokens, a wrong one of 16. TRL pads both
to the longest, so it computes 134 tokens a pair and whet 79. Longer prompts and responses of more various lengths
make the difference larger. The script prints the tokens a pair of both.

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
    parser.add_argument("--model", default=f"{START}/model", help="a model folder that transformers loads")
    parser.add_argument("--pairs", type=Path, help="JSON lines with prompt, chosen and rejected, as texts")
    parser.add_argument("--max-length", type=int, default=256, help="longer sequences are left out or cut")
    args = parser.parse_args()
    if args.pairs is None or args.model == parser.get_default("model"):
        prepare()
    if args.pairs is None:
        args.pairs = PAIRS
        make_pairs(args.steps * args.batch)
    shared, padded = tokens_of_a_pair(args)
    print(f"tokens a pair: {shared:.0f} of whet, with the prompt once; {padded:.0f} of TRL, with padding", flush=True)
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


def tokens_of_a_pair(args: argparse.Namespace) -> tuple[float, float]:
    """Return the mean tokens that each computes for a pair, over the batches in the order of the file."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def length(*texts: str) -> int:
        roles = zip(("user", "assistant"), texts, strict=False)
        messages = [{"role": role, "content": text} for role, text in roles]
        open_end = len(texts) == 1
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=open_end, return_dict=False))

    lengths = []
    for line in args.pairs.read_text(encoding="utf-8").splitlines()[: args.steps * args.batch]:
        pair = json.loads(line)
        prompt = pair["prompt"]
        of_pair = length(prompt), length(prompt, pair["chosen"]), length(prompt, pair["rejected"])
        if max(of_pair) <= args.max_length:
            lengths.append(of_pair)
    shared = [chosen + rejected - prompt for prompt, chosen, rejected in lengths]
    batches = [lengths[at : at + args.batch] for at in range(0, len(lengths), args.batch)]
    padded = [2 * max(max(of_pair) for of_pair in batch) for batch in batches]
    return statistics.mean(shared), statistics.mean(padded)


def ours(args: argparse.Namespace) -> tuple[list[dict[str, float]], float]:
    """Train with whet; give the metrics of each step, and the seconds until the end of the first."""
    folder, recipe = Path(f"runs/bench/whet-{args.kind}"), Path(f"runs/bench/{args.kind}.yaml")
    shutil.rmtree(folder, ignore_errors=True)
    algorithm, backend = of_kind(args)
    document = {
        "run": {"folder": str(folder), "steps": args.steps, "export": False},
        "model": {"path": args.model},
        "algorithm": {"use": args.kind, "batch_size": args.batch, **algorithm},
        "backend": {
            "use": "fsdp2",
            "optimizer": {"lr": 1.0e-4, "betas": [0.9, 0.99]},
            "schedule": {"warmup_steps": 3},
            **backend,
        },
        "data": {"train": [{"path": str(args.pairs)}], "max_length": args.max_length},
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
    words = [args.kind, args.model, str(args.pairs), "--steps", str(args.steps), "--threads", str(args.threads)]
    words += ["--batch", str(args.batch), "--max-length", str(args.max_length), *["--precomputed"] * args.precomputed]
    began = time.time()
    told = json.loads(run(sys.executable, str(HERE / "trl_pairs.py"), *words).splitlines()[-1])
    return [float(s) for s in told["seconds"]], told["losses"], told["first"] - began


if __name__ == "__main__":
    main()
