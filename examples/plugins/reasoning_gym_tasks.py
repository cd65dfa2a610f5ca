"""The tasks of reasoning-gym, a hundred generators of puzzles (`pip install reasoning-gym`), with its own scorers.

Some scorers of reasoning-gym evaluate the answer as code, so they run in grader processes.
"""

from functools import cache

from attrs import frozen

import whet
from whet_sandbox.pool import GraderPool


@frozen
class ReasoningGymConfig:
    """The tasks of a data set of reasoning-gym."""

    dataset: str = "leg_counting"
    """Name of the data set, e.g. `countdown`, `sudoku` or `family_relationships`."""
    tasks: int = 500
    """Tasks of each split."""


class ReasoningGym(whet.SingleTurn):
    def __init__(self, config):
        splits = {}
        for seed, split in enumerate(("train", "test")):
            where = [config.dataset, config.tasks, seed]
            splits[split] = [
                whet.Task(item["question"], {"answer": str(item["answer"]), "item": [*where, position]})
                for position, item in enumerate(dataset(*where))
            ]
        self._pool = GraderPool(score)
        super().__init__(splits, rewards={"score": self.score}, answer=str.strip)

    async def score(self, text, data):
        return await self._pool.call(text.strip(), *data["item"])

    def close(self):
        self._pool.close()


def score(answer, name, size, seed, position):
    """Return the score of an answer, from 0 to 1. Runs in a grader process."""
    items = dataset(name, size, seed)
    return float(items.score_answer(answer, items[position]))


@cache
def dataset(name, size, seed):
    """Return a data set. Item i depends on the seed and on i alone."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=size, seed=seed)


@whet.hookimpl
def whet_environments():
    return [whet.Component("reasoning-gym", ReasoningGymConfig, ":ReasoningGym")]
