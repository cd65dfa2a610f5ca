"""Measure what the fsdp2 backend adds to a step of its model written by hand: one rank, the same packed row.

    python benchmarks/backend_overhead.py                64 demonstrations, 16 prompts x 8 samples, in turn
    python benchmarks/backend_overhead.py --hidden 256   a larger model

By hand: the model's forward pass on a row that was laid out before, cross-entropy of the logits at the positions that
are read, the backward pass, clipping, fused AdamW. The backend starts from the batch: it counts, plans, lays out,
computes logprobs in chunks and a loss that it does not know, and merges metrics. Both use the same modules and
attention. Loss and gradient norm are compared first. Steps alternate; ratios are of neighbours. `cpu` is processor time
over all threads.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from backend_step import grpo_batch, sft_batch

from whet.component import Spec
from whet.data.batch import Batch
from whet.data.model_info import read_model
from whet.interfaces.workers import WorkerRank
from whet_start.small_models import make_model, make_tokenizer

LOSS = Spec("whet_sft.losses:Nll", "whet_sft.config:NllConfig", {})
MAX_NORM = 1.0


def main() -> None:
    """Print the ratios for both kinds of batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    from whet_fsdp2.worker import Worker

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(["Compute 7+8-3+6-1."], 378)
        make_model(folder, tokenizer, hidden=args.hidden, layers=4, heads=4, kv_heads=4, mlp=3 * args.hidden)
        worker, other = (
            Worker(
                rank=WorkerRank("backend", 0, 1, threads=args.threads),
                config={"micro_batch_tokens": 8192, "optimizer": {"lr": 1e-4}, "max_grad_norm": MAX_NORM},
                model=read_model(folder),
                scratch=folder,
            )
            for _ in range(2)
        )
    for name, make in (("demonstrations", sft_batch), ("samples with common prompts", grpo_batch)):
        batch = make(len(tokenizer), np.random.Generator(np.random.Philox(0)))
        by_hand = step_by_hand(other, batch)
        compare(worker, other, batch, by_hand)
        print(f"{name}: {batch.tokens} tokens,", measure(partial(worker.train, batch, LOSS), by_hand, args.steps))


def step_by_hand(worker: Any, batch: Batch) -> Callable[[], tuple[float, float]]:
    """Return a step on the worker's own model that uses nothing else of the worker. It returns loss and norm."""
    from whet_fsdp2.feed import feed
    from whet_fsdp2.narrowed import read_only_at

    model, one = worker._root.model, feed(batch, worker._layout, torch.device("cpu"))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)
    read_only_at(worker._root.narrowed, one.rows, one.arguments["input_ids"].numel())

    def step() -> tuple[float, float]:
        hidden = model.base_model(**one.arguments).last_hidden_state[0]
        logits = hidden.index_select(0, one.source) @ model.get_output_embeddings().weight.T
        loss = torch.nn.functional.cross_entropy(logits, one.targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()), float(norm)

    return step


def compare(worker: Any, other: Any, batch: Batch, by_hand: Callable[[], tuple[float, float]]) -> None:
    """Refuse to measure two different things: from the same weights, loss and norm of the gradient must agree."""
    with torch.no_grad():
        for mine, theirs in zip(worker._root.model.parameters(), other._root.model.parameters(), strict=True):
            theirs.copy_(mine)
    found = worker.train(batch, LOSS)
    np.testing.assert_allclose(by_hand(), [found[name].number() for name in ("loss", "grad_norm")], rtol=1e-4)


def measure(backend: Callable[[], object], by_hand: Callable[[], object], steps: int) -> str:
    """Take steps of both in turn, and return the medians and their ratios."""
    seconds: list[tuple[float, ...]] = []
    for _ in range(steps + 3):
        row: list[float] = []
        for step in (backend, by_hand):
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            row += [time.process_time() - cpu, time.perf_counter() - wall]
        seconds.append(tuple(row))
    cpu, hand_cpu = (sorted(one[i] for one in seconds[3:]) for i in (0, 2))
    ratios = [statistics.median(one[i] / one[i + 2] for one in seconds[3:]) for i in (0, 1)]
    return (
        f"backend {1000 * statistics.median(cpu):.1f} ms cpu (least {1000 * cpu[0]:.1f}), by hand "
        f"{1000 * statistics.median(hand_cpu):.1f} ms (least {1000 * hand_cpu[0]:.1f}); ratio {ratios[0]:.3f} of cpu, "
        f"{ratios[1]:.3f} of wall, {cpu[0] / hand_cpu[0]:.3f} of the least"
    )


if __name__ == "__main__":
    main()
