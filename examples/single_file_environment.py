"""An environment in one file, for a start: `plugins: [single_file_environment.py]` in the recipe loads it.

When it has proved itself, `whet new environment NAME` makes a package to move it to.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

import whet
from whet.data.randomness import generator


@frozen
class LettersConfig:
    """Words in which to count a letter."""

    length: int = 6
    """Letters of each word."""


def build(config: LettersConfig) -> whet.SingleTurn:
    """Build the environment with the splits `train` and `test`."""
    splits = {
        split: [task(seed, i, config.length) for i in range(1000)] for seed, split in enumerate(("train", "test"))
    }
    return whet.SingleTurn(splits, rewards={"correct": correct}, answer=str.strip)


def task(seed: int, position: int, length: int) -> whet.Task:
    """Make the task at a position: the same word every time it is asked for."""
    word = "".join(generator(seed, "letters", position).choice(list("abcd"), length))
    return whet.Task(f"How many times is a in {word}? Answer with a number.", {"answer": str(word.count("a"))})


def correct(answer: str, data: Mapping[str, Any]) -> float:
    """Return 1 for the number alone, else 0."""
    return float(answer.strip() == data["answer"])


@whet.hookimpl
def whet_environments() -> Iterable[whet.Component]:
    """Offer `letters`."""
    return [whet.Component("letters", LettersConfig, ":build")]
