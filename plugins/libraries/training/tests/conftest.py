"""Batches whose sequences have unequal lengths."""

from collections.abc import Callable

import numpy as np
import pytest

from whet.data.batch import Batch, from_sequences

GROUPS = {"sft": (1, 1), "pairs": (2, 2), "samples": (8, 1)}
"""Sequences of a group, and of a unit."""


def make_demonstrations(sizes: list[int], group: list[int] | None = None) -> Batch:
    """Sequences of which this many tokens pass the model."""
    rows = [{"tokens": np.arange(n + 1) + 7 * i, "loss_mask": np.arange(n + 1) > 0} for i, n in enumerate(sizes)]
    return from_sequences(rows, prompt_lengths=[1] * len(sizes), group=group)


def make_groups(kind: str, groups: int, seed: int = 0) -> Batch:
    """Groups with a prompt of about 20 tokens; completions are of very unequal lengths."""
    draw = np.random.default_rng(seed)
    samples, unit = GROUPS[kind]
    rows, prompts, group = [], [], []
    for g in range(groups):
        prompt = draw.integers(100, size=draw.integers(5, 40))
        for _ in range(samples):
            answer = draw.integers(100, size=int(draw.lognormal(3.5, 0.7)) + 1)
            tokens = np.concatenate([prompt, answer])
            rows.append({"tokens": tokens, "loss_mask": np.arange(len(tokens)) >= len(prompt)})
            prompts.append(len(prompt))
            group.append(g)
    made = from_sequences(rows, prompt_lengths=prompts, group=group)
    return made.with_columns(unit=np.arange(made.sequences) // unit)


@pytest.fixture(scope="session")
def demonstrations() -> Callable[..., Batch]:
    """Return `make_demonstrations`."""
    return make_demonstrations


@pytest.fixture(scope="session")
def drawn() -> Callable[..., Batch]:
    """Return `make_groups`."""
    return make_groups
