"""Measure a step of SFT of whet against TRL's SFTTrainer with packing: same model, records and threads, in turn.

    nox -s bench                                     among others, three rounds of twelve steps of each
    python benchmarks/sft_step.py --rows 256 512     lengths of TRL's packed rows; the fastest counts
    python benchmarks/sft_step.py --model FOLDER --records FILE --rows 512 1024
                                                     the same with a model and records of your own
    python benchmarks/sft_step.py --compile whet trl     both with layers compiled by torch.compile

The figure is time for a token. Both train on the responses alone, and count prompts among the tokens. TRL's trainer
puts all rows of a batch into one forward pass, whose attention reads every token with every other; so each row has a
pass of its own, which is faster. TRL is set as is fastest for a model this small on a CPU: float32, no gradient
checkpointing. The first steps of each run are left out. Ratios are of medians, within a round.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from pathlib import Path

from grpo_step import HERE, START, prepare, run
from pair_step import worked

RECORDS = Path("models/bench/records.jsonl")
LENGTH = 36
"""About how many tokens a record has."""


def main() -> None:
    """Run both in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 512], help="tokens of a packed row of TRL")
    parser.add_argument("--compile", nargs="*", default=[], choices=["whet", "trl"], help="who compiles its layers")
    parser.add_argument("--model", default=f"{START}/model", help="a model folder that transformers loads")
    parser.add_argument("--records", type=Path, help="JSON lines with prompt and completion, as texts")
    args = parser.parse_args()
    if args.records is None or args.model == parser.get_default("model"):
        prepare()
    args.length = LENGTH
    if args.records is None:
        args.records = RECORDS
        make_records(2 * args.steps * args.tokens // LENGTH)
    else:
        args.length = mean_length(args)
    ratios = []
    for number in range(1, args.rounds + 1):
        peers = {row: trl(args, row) for row in args.rows}
        row = min(peers, key=lambda row: peers[row][0])
        peer, peer_losses, peer_start = peers[row]
        rows, own_start = ours(args)
        own = statistics.median(one["seconds/step"] / one["tokens"] for one in rows[args.skip :])
        ratios.append(own / peer)
        print(
            f"round {number}: whet {1e6 * own:.1f} us a token, TRL {1e6 * peer:.1f} us a token in rows of {row}, ratio "
            f"{ratios[-1]:.2f}; from the command to the end of the first step: {own_start:.1f} s against "
            f"{peer_start:.1f} s",
            flush=True,
        )
    print(f"ratio of a token of sft, median of {args.rounds} rounds: {statistics.median(ratios):.2f}")
    print(f"losses of the first and the last step: whet {rows[0]['loss']:.4f} {rows[-1]['loss']:.4f}, "
          f"TRL {peer_losses[0]:.4f} {peer_losses[-1]:.4f}")  # fmt: skip


def make_records(count: int) -> None:
    """Write sums: some with the way to the result, others with the result alone."""
    from whet_env_math.arithmetic import Arithmetic
    from whet_env_math.config import ArithmeticConfig

    rng, tasks = random.Random(0), Arithmetic(ArithmeticConfig()).tasks("train")
    with RECORDS.open("w", encoding="utf-8") as file:
        for i in range(count):
            task = tasks[i]
            prompt, answer = task.prompt[0].text, int(task.data["answer"])
            completion = worked(prompt, answer) if rng.random() < 0.5 else rf"The answer is \boxed{{{answer}}}."
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")


def mean_length(args: argparse.Namespace) -> int:
    """Return the mean tokens of the first thousand records."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    records = [json.loads(line) for line in args.records.read_text(encoding="utf-8").splitlines()[:1000]]
    texts = [f"{record['prompt']} {record['completion']}" for record in records]
    return round(statistics.mean(map(len, tokenizer(texts)["input_ids"])))


def ours(args: argparse.Namespace) -> tuple[list[dict[str, float]], float]:
    """Train with whet; give the metrics of each step, and the seconds until the end of the first."""
    folder, recipe = Path("runs/bench/whet-sft"), Path("runs/bench/sft.yaml")
    shutil.rmtree(folder, ignore_errors=True)
    document = {
        "run": {"folder": str(folder), "steps": args.steps, "export": False},
        "model": {"path": args.model},
        "algorithm": {"use": "sft", "batch_size": max(1, args.tokens // args.length)},
        "backend": {
            "use": "fsdp2",
            "optimizer": {"lr": 1.0e-4, "betas": [0.9, 0.99]},
            "schedule": {"warmup_steps": 3},
            "compile": "whet" in args.compile,
        },
        "data": {"train": [{"path": str(args.records)}]},
        "cluster": {"threads": {"backend": args.threads}},
        "loggers": [],
    }
    recipe.write_text(json.dumps(document), encoding="utf-8")
    began = time.time()
    run("whet", "run", str(recipe))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, rows[0]["time"] - began


def trl(args: argparse.Namespace, row: int) -> tuple[float, list[float], float]:
    """Train with TRL; give the seconds of a token, the losses, and the seconds until the end of the first step."""
    words = [args.model, str(args.records), "--steps", str(args.steps), "--threads", str(args.threads)]
    words += ["--tokens", str(args.tokens), "--row", str(row), *["--compile"] * ("trl" in args.compile)]
    began = time.time()
    told = json.loads(run(sys.executable, str(HERE / "trl_sft.py"), *words).splitlines()[-1])
    return statistics.median(told["seconds"][args.skip :]) / told["tokens"], told["losses"], told["first"] - began


if __name__ == "__main__":
    main()
