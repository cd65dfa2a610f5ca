"""Measure what `whet report` costs for a long run: processor time, and the size of the page.

    python benchmarks/report_page.py                      1,000 and 10,000 steps
    python benchmarks/report_page.py --keep FOLDER        leave the run folders there, to look at their pages

The run is made up, but its files are written as a run writes them: 60 metrics and 30 spans for each step, eight
episodes recorded token by token on every tenth, and an evaluation on every hundredth.
"""

import argparse
import math
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from whet.run.run_folder import RunFolder
from whet_report.page import write_page
from whet_report.run import read_run

METRICS, SEQUENCES, SEQUENCE_TOKENS = 60, 8, 128
PHASES = (("rollout", "take", 0.0, 2.0), ("backend", "score", 2.0, 0.4), ("backend", "train", 2.4, 1.0),
          ("backend", "weight_sync", 3.4, 0.3), ("run", "save", 3.7, 0.2))  # fmt: skip


def write_run(path: Path, steps: int) -> Path:
    """Write a run folder of so many steps."""
    run, rng = RunFolder(path), random.Random(0)
    run.write_text("config.yaml", f"run: {{steps: {steps}}}\nrollout: {{record: {{every: 10}}}}\n")
    run.append("journal.jsonl", [{"time": 1000.0, "event": "opened"}])
    run.append("metrics.jsonl", (_metrics(step, steps, rng) for step in range(1, steps + 1)))
    run.append("spans.jsonl", (span for step in range(1, steps + 1) for span in _spans(step)))
    for step in range(1, steps + 1):
        if step % 10 == 0:
            rows = [_episode(step, sample, rng) for sample in range(SEQUENCES)]
            run.append(f"rollouts/step-{step:06d}.jsonl", rows)
            if step % 100 == 0:
                run.append(f"evaluations/step-{step:06d}-sums.jsonl", rows)
    run.append("journal.jsonl", [{"time": 1000.0 + 4.0 * steps, "event": "closed"}])
    return path


def _metrics(step: int, steps: int, rng: random.Random) -> dict[str, Any]:
    progress = step / steps
    row = {"step": step, "time": 1000.0 + 4.0 * step, "seconds/step": 3.9 + 0.1 * rng.random()}
    row |= {"loss": math.exp(-3 * progress) + 0.1 * rng.random(), "reward/mean": progress + 0.1 * rng.random()}
    row |= {"logprob_gap/max": 1e-3 * rng.random(), "response_length/mean": 200 + 50 * rng.random()}
    row |= {f"other/{i}": rng.gauss(i, 1.0) for i in range(METRICS - len(row))}
    name, reward = "evaluation/sums/reward", 0.8 * progress
    evaluated = {name: reward, f"{name}/ci_low": max(0.0, reward - 0.1), f"{name}/ci_high": reward + 0.1}
    return row | (evaluated if step % 100 == 0 else {})


def _spans(step: int) -> list[dict[str, Any]]:
    begin = 1000.0 + 4.0 * (step - 1)
    made = [("generator", "generate", 0.16 * i, 0.15) for i in range(25)]
    return [
        {"step": step, "role": role, "phase": phase, "begin": begin + first, "seconds": seconds}
        for role, phase, first, seconds in (*PHASES, *made)
    ]


def _episode(step: int, sample: int, rng: random.Random) -> dict[str, Any]:
    tokens, logprobs = list(range(SEQUENCE_TOKENS)), [-rng.random() for _ in range(SEQUENCE_TOKENS)]
    sequence = {
        "prompt_length": 16, "tokens": tokens, "pieces": [f" word{token}" for token in tokens],
        "loss_mask": [0] * 16 + [1] * (SEQUENCE_TOKENS - 16), "versions": [step - 1] * SEQUENCE_TOKENS,
        "sampler_logprobs": logprobs, "trainer_logprobs": [logprob + rng.gauss(0, 1e-4) for logprob in logprobs],
    }  # fmt: skip
    messages = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "It is 7."}]
    row = {"group": sample // 4, "sample": sample, "environment": "sums", "reward": rng.random(), "messages": messages}
    return row | {"sequences": [sequence]}


def main() -> None:
    """Print a line for each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="*", default=[1_000, 10_000])
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for steps in options.steps:
            run = write_run((options.keep or Path(folder)) / f"run-{steps}", steps)
            begin = time.process_time()
            data = read_run(run)
            read = time.process_time()
            size = write_page(run / "report.html", data)
            written = time.process_time()
            print(
                f"{steps:>7,} steps: read {read - begin:6.2f} s, page {written - read:5.2f} s, {size / 1e6:.1f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
