"""Measure one optimizer step of the fsdp2 backend, by layout, on the shapes of the quickstart.

    python benchmarks/backend_step.py                    an update of GRPO: 16 prompts x 8 samples
    python benchmarks/backend_step.py --kind sft         64 sequences without common prompts
    python benchmarks/backend_step.py --compile          each layout with compiled layers too

Layouts take turns within one process, so that a busy machine hurts them alike; compare columns, not runs.
`cpu` is seconds of processor time, over all threads.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from whet.component import Spec
from whet.data.batch import Batch, from_sequences
from whet.data.model_info import read_model
from whet.interfaces.loss import LossResult
from whet.interfaces.workers import WorkerRank
from whet_start.small_models import make_model, make_tokenizer


class PolicyGradient:
    """Clipped policy gradient on made-up advantages."""

    columns = ("advantages", "old_logprobs")
    outputs = ("logprobs",)
    weights: Mapping[str, float] = {"policy": 1.0}

    def __init__(self, config: object = None) -> None:
        pass

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Count trained tokens."""
        return {"policy": batch["loss_mask"].sum()}

    def live(self, batch: Batch) -> Any:
        """Return that all count."""
        return torch.ones(batch.sequences, dtype=torch.bool)

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Compute the clipped objective."""
        ratio = (outputs["logprobs"] - batch["old_logprobs"]).exp()
        advantages = batch["advantages"].repeat_interleave(batch["lengths"])
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return LossResult({"policy": -(gain * batch["loss_mask"]).sum()})


def grpo_batch(vocabulary: int, draw: np.random.Generator) -> Batch:
    """16 prompts of about 21 tokens; of their 8 answers four have 4 tokens and four 29."""
    rows, prompts, groups = [], [], []
    for group in range(16):
        prompt = draw.integers(vocabulary, size=draw.integers(19, 24))
        for length in (4, 29) * 4:
            answer = draw.integers(vocabulary, size=length)
            tokens = np.concatenate([prompt, answer])
            rows.append({"tokens": tokens, "loss_mask": np.arange(len(tokens)) >= len(prompt)})
            prompts.append(len(prompt))
            groups.append(group)
    return from_sequences(rows, prompt_lengths=prompts, group=groups)


def sft_batch(vocabulary: int, draw: np.random.Generator) -> Batch:
    """64 sequences of 25 to 50 tokens, prompts of about 21."""
    rows, prompts = [], []
    for _ in range(64):
        prompt = int(draw.integers(19, 24))
        tokens = draw.integers(vocabulary, size=prompt + int(draw.choice([4, 29])))
        rows.append({"tokens": tokens, "loss_mask": np.arange(len(tokens)) >= prompt})
        prompts.append(prompt)
    return from_sequences(rows, prompt_lengths=prompts)


def main() -> None:
    """Print a line for each layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("grpo", "sft"), default="grpo")
    parser.add_argument("--layouts", nargs="+", default=["padded", "packed", "shared"])
    parser.add_argument("--compile", action="store_true", help="measure `compile: true` of each layout, too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batch-tokens", type=int, nargs="+", default=[8192])
    args = parser.parse_args()
    from whet_fsdp2.worker import Worker

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(["Compute 7+8-3+6-1."], 378)
        make_model(folder, tokenizer, hidden=128, layers=4, heads=4, kv_heads=4, mlp=384)
        model = read_model(folder)
        workers = {
            (f"{layout}{', compiled' * compiled}", budget): Worker(
                rank=WorkerRank("backend", 0, 1, threads=args.threads),
                config={"layout": layout, "micro_batch_tokens": budget, "optimizer": {"lr": 1e-4}, "compile": compiled},
                model=model,
                scratch=folder,
            )
            for layout in args.layouts
            for budget in args.micro_batch_tokens
            for compiled in ([False, True] if args.compile else [False])
        }
    draw = np.random.Generator(np.random.Philox(0))
    batch = (grpo_batch if args.kind == "grpo" else sft_batch)(len(tokenizer), draw)
    advantages = draw.standard_normal(batch.sequences).astype(np.float32)
    batch = batch.with_columns(advantages=advantages)
    first = next(iter(workers.values()))
    batch = batch.with_columns(old_logprobs=first.score(batch, ("logprobs",))["logprobs"])
    measure(workers, batch, args.steps)


def measure(workers: Mapping[tuple[str, int], Any], batch: Batch, steps: int) -> None:
    """Take steps with all workers in turn."""
    spec = Spec("backend_step:PolicyGradient")
    wall: dict[Any, list[float]] = {key: [] for key in workers}
    cpu: dict[Any, list[float]] = {key: [] for key in workers}
    phases: dict[Any, list[dict[str, float]]] = {key: [] for key in workers}
    for step in range(steps + 3):
        for key, worker in workers.items():
            begin, work = time.perf_counter(), time.process_time()
            found = worker.train(batch, spec)
            if step >= 3:
                wall[key].append(time.perf_counter() - begin)
                cpu[key].append(time.process_time() - work)
                phases[key].append({k: m.number() for k, m in found.items() if k.startswith("seconds/")})
    for key in workers:
        parts = {
            name.removeprefix("seconds/backend."): 1000 * statistics.median(row[name] for row in phases[key])
            for name in phases[key][0]
        }
        print(
            f"{key[0]:18s} {key[1]:6d}  wall {1000 * statistics.median(wall[key]):6.1f} ms "
            f"(least {1000 * min(wall[key]):6.1f})  cpu {1000 * statistics.median(cpu[key]):6.1f} ms  "
            + "  ".join(f"{name} {value:.1f}" for name, value in parts.items())
        )


if __name__ == "__main__":
    main()
