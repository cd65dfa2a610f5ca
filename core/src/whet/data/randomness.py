"""Randomness is derived, never carried: each draw is a function of the run's seed and of its purpose."""

import hashlib

import numpy as np


def derive_seed(seed: int, purpose: str, *position: int) -> int:
    """Return the 63-bit seed of one purpose at one position, e.g. (run seed, "sample", task, sample, turn)."""
    text = ":".join([str(seed), purpose, *map(str, position)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *position: int) -> np.random.Generator:
    """Return a NumPy generator for one purpose at one position."""
    return np.random.Generator(np.random.Philox(derive_seed(seed, purpose, *position)))
