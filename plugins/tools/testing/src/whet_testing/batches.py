"""Random batches of NumPy arrays, with the columns that losses and backends read."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from attrs import evolve

from whet.data import randomness
from whet.data.batch import Batch, from_sequences

Column = Callable[[Batch, np.random.Generator], Any]


def _logprobs(batch: Batch, rng: np.random.Generator) -> Any:
    return np.where(batch["loss_mask"], -rng.exponential(size=batch.tokens), 0).astype(np.float32)


def _advantages(batch: Batch, rng: np.random.Generator) -> Any:
    """Return normal numbers, and 0 for the sequences of every third group, from which nothing is to be learned."""
    return np.where(batch["group"] % 3 == 1, 0, rng.normal(size=batch.sequences)).astype(np.float32)


def token_advantages(batch: Batch, rng: np.random.Generator) -> Any:
    """Return advantages of tokens [N]: the sequence's advantage x a random number, 0 where `loss_mask` is false."""
    own = np.repeat(_advantages(batch, rng), batch["lengths"]) * rng.normal(size=batch.tokens)
    return np.where(batch["loss_mask"], own, 0).astype(np.float32)


COLUMNS: dict[str, Column] = {
    "advantages": _advantages,
    "old_logprobs": _logprobs,
    "sampler_logprobs": _logprobs,
    "reference_logprobs": _logprobs,
    "temperature": lambda batch, rng: np.ones(batch.sequences, np.float32),
    "version": lambda batch, rng: np.where(batch["loss_mask"], 0, -1).astype(np.int32),
    "reward": lambda batch, rng: rng.normal(size=batch.sequences).astype(np.float32),
    "task_reward": lambda batch, rng: rng.normal(size=batch.sequences).astype(np.float32),
    "greedy_reward": lambda batch, rng: (batch["group"] % 5 / 4).astype(np.float32),
    "stopped": lambda batch, rng: rng.random(batch.sequences) < 0.8,
    "chosen": lambda batch, rng: np.diff(batch["unit"], prepend=-1) != 0,
    "env": lambda batch, rng: np.zeros(batch.sequences, np.int64),
}
"""Makers of the columns that several components share."""


def random_batch(
    seed: int = 0,
    *,
    columns: Iterable[str] = (),
    sequences: int = 12,
    group_size: int = 4,
    unit_size: int = 1,
    vocabulary: int = 256,
    longest: int = 12,
    makers: dict[str, Column] | None = None,
) -> Batch:
    """Return sequences of different lengths: a prompt, then an answer of which most tokens are to be learned.

    As in a run, the `info` of the batch has `step` and `steps`.

    A group has `group_size` sequences with the same prompt. A unit has `unit_size` sequences. Raises `KeyError` for a
    column that neither `COLUMNS` nor `makers` can make.
    """
    rng = randomness.generator(seed, "random batch")
    rows, prompt_lengths = [], []
    for index in range(sequences):
        if index % group_size == 0:
            prompt = rng.integers(3, vocabulary, rng.integers(1, 5))
        answer = rng.integers(3, vocabulary, rng.integers(2, longest - 4))
        learned = rng.random(len(answer)) < 0.8
        learned[0] = True
        tokens, mask = np.concatenate([prompt, answer]), np.concatenate([np.zeros(len(prompt), bool), learned])
        rows.append({"tokens": tokens, "loss_mask": mask})
        prompt_lengths.append(len(prompt))
    positions = np.arange(sequences)
    batch = from_sequences(
        rows, prompt_lengths=prompt_lengths, group=list(positions // group_size), unit=list(positions // unit_size)
    )
    known = {**COLUMNS, **(makers or {})}
    for name in columns:
        if name not in known:
            raise KeyError(f"nobody says how to make the column {name!r}; known are {', '.join(sorted(known))}")
        batch = batch.with_columns(**{name: known[name](batch, rng)})
    return evolve(batch, info={"step": 2, "steps": 10})
