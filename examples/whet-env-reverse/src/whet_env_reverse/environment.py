"""Random words, and two rewards: right, and how many letters are in place."""

from collections.abc import Mapping
from string import ascii_lowercase
from typing import Any

from whet.data.randomness import generator
from whet.data.records import Task
from whet.interfaces.environment import SingleTurn
from whet_env_reverse.config import ReverseConfig


def build(config: ReverseConfig) -> SingleTurn:
    """Build the environment with the splits `train` and `test`."""
    splits = {
        split: [task(seed, i, config.letters) for i in range(config.words)]
        for seed, split in enumerate(("train", "test"))
    }
    return SingleTurn(splits, rewards={"correct": correct, "in_place": (in_place, 0.1)}, answer=str.strip)


def task(seed: int, position: int, letters: int) -> Task:
    """Make the task at a position: the same word every time it is asked for."""
    word = "".join(generator(seed, "reverse", position).choice(list(ascii_lowercase), letters))
    return Task(f"Write {word} backwards.", {"answer": word[::-1]})


def correct(answer: str, data: Mapping[str, Any]) -> float:
    """Return 1 for the word alone, else 0."""
    return float(answer.strip() == data["answer"])


def in_place(answer: str, data: Mapping[str, Any]) -> float:
    """Return the share of letters that are in place, 0 for an answer of another length."""
    wanted, given = data["answer"], answer.strip()
    if len(given) != len(wanted):
        return 0.0
    return sum(a == b for a, b in zip(given, wanted, strict=True)) / len(wanted)
