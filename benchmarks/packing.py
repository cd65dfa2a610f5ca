"""Count what packing and sharing out leave idle, against next-fit and shards of equal lengths. Nothing is trained.

    python benchmarks/packing.py

Prompts of about 200 tokens and responses of about 400, log-normal; micro-batches of 8,192 tokens; attention costs what
it does in a model of 8 billion parameters. `heaviest` is the work of the rank with the most, over the mean: the others
wait for it. `micro` is how many micro-batches all ranks run: as many as the rank with the most.
"""

import time
from collections.abc import Callable

import numpy as np

from whet.data.batch import Batch, Shards, from_sequences
from whet_training.layout import used_lengths
from whet_training.packing import Costs, plan
from whet_training.sharing import share

BUDGET = 8192
PAIR = 3.3e-5
"""Cost of a query and a key, in tokens; see `whet_training.sharing.pair_cost`."""
KINDS = {"sft": (1, 1), "dpo": (2, 2), "grpo": (8, 1), "grpo, half of the groups dead": (8, 1)}
"""Sequences of a group, and of a unit."""


def main() -> None:
    """Print a line for each kind of batch and number of ranks."""
    for kind, groups in (("sft", 256), ("dpo", 128), ("grpo", 64), ("grpo, half of the groups dead", 64)):
        for ranks in (2, 8):
            batch, live = make(kind, groups)
            begin = time.perf_counter()
            new = share(batch, ranks, "shared", PAIR, live)
            seconds = time.perf_counter() - begin
            mean = np.mean([work(shard) for shard in new])
            before, after = heaviest(batch.shard(ranks), mean), heaviest(new, mean)
            old_count, count = (
                most(batch.shard(ranks), next_fit),
                most(new, lambda shard: len(plan(shard, "shared", BUDGET))),
            )
            print(
                f"{kind}, {batch.tokens} tokens, {ranks} ranks: heaviest {before:.3f} -> {after:.3f}, "
                f"micro {old_count} -> {count} (work for {mean / BUDGET:.1f}); shared out in {1000 * seconds:.0f} ms"
            )


def make(kind: str, groups: int) -> tuple[Batch, np.ndarray]:
    """Draw a batch, and say which of its sequences are live. Dead ones have no loss mask, so their `work` is 0."""
    draw = np.random.Generator(np.random.Philox(0))
    samples, unit = KINDS[kind]
    alive = draw.random(groups) < (0.5 if "dead" in kind else 2.0)
    rows, prompts, group = [], [], []
    for g in range(groups):
        prompt = draw.integers(1000, size=length(draw, 200, 0.6))
        for _ in range(samples):
            tokens = np.concatenate([prompt, draw.integers(1000, size=length(draw, 400, 0.8))])
            rows.append({"tokens": tokens, "loss_mask": (np.arange(len(tokens)) >= len(prompt)) & alive[g]})
            prompts.append(len(prompt))
            group.append(g)
    made = from_sequences(rows, prompt_lengths=prompts, group=group)
    return made.with_columns(unit=np.arange(made.sequences) // unit), alive[np.array(group)]


def length(draw: np.random.Generator, typical: float, spread: float) -> int:
    """Draw a length, log-normal, between 2 and 8,000."""
    return int(np.clip(draw.lognormal(np.log(typical), spread), 2, 8000))


def costs(batch: Batch, pair: float) -> Costs:
    """Return the costs of the units of a batch, in order of group."""
    units = sorted(batch.units(), key=lambda unit: int(batch["group"][unit[0]]))
    return Costs.of(batch, units, used_lengths(batch), "shared", pair)


def work(batch: Batch) -> float:
    """Return what is computed of a batch, in tokens."""
    of = costs(batch, PAIR)
    return of.total(of.join(of.units)) if of.units else 0.0


def heaviest(shards: Shards, mean: float) -> float:
    """Return the work of the rank with the most, over the mean."""
    return max(work(shard) for shard in shards) / mean


def next_fit(batch: Batch) -> int:
    """Count micro-batches if each unit goes into the last one, where it fits."""
    return len(costs(batch.where(np.asarray(used_lengths(batch)) > 0), 0.0).pieces(BUDGET, across=True))


def most(shards: Shards, count: Callable[[Batch], int]) -> int:
    """Return the number of micro-batches of the rank with the most."""
    return max(count(shard) for shard in shards)


if __name__ == "__main__":
    main()
