"""Plays any game with a model: one move a turn, until the game is solved or the turns or illegal moves are used up.

    user       rules and first position        derived from the seed of the task
    assistant  ... <action>up</action>
    user       the next position, or why the move is illegal; an illegal move changes nothing
    assistant  ...

A game is a set of pure functions of positions (`Game`). A position never changes: a move gives another one. So the
episodes of a group, which begin at the same position, cannot disturb each other.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from whet.data.messages import Conversation, Message
from whet.data.randomness import derive_seed
from whet.data.records import Group, Task
from whet.errors import ContextFull, DataError
from whet.interfaces.environment import Model
from whet_data.generated import GeneratedTasks, held_out
from whet_data.quoting import filled
from whet_env_games.actions import action_in
from whet_env_games.config import GameConfig

P = TypeVar("P")
MOST_DRAWS = 2_000
"""Most draws for one task. One position in ten is held out, if there are many."""


class IllegalMove(Exception):  # noqa: N818 - the field's word
    """A move that the rules do not allow. The message tells the model why, without its own words."""


class Game(Protocol[P]):
    """The rules of a game."""

    name: str

    def rules(self, difficulty: int) -> str:
        """Return the rules as text. They name the moves."""

    def start(self, draw: random.Random, difficulty: int) -> P:
        """Return a first position, which is not solved."""

    def key(self, position: P) -> str:
        """Return text that is equal for equal first positions. Its hash decides the split."""

    def shown(self, position: P) -> str:
        """Return what the model sees of a position."""

    def moved(self, position: P, move: str) -> P:
        """Return the position after a move. Raises `IllegalMove`."""

    def solved(self, position: P) -> bool:
        """Return whether the game is solved."""

    def progress(self, position: P) -> float:
        """Return how near the solution is, from 0 to 1."""

    def measures(self, position: P) -> Mapping[str, float]:
        """Return measures of a game that ended in a position. They are recorded, and not trained on."""

    def revealed(self, position: P) -> str:
        """Return all that there is to know about a position, for records."""


class GameEnvironment(Generic[P]):
    """The environment of one game: reward `solved`, and with their weights `progress` and `illegal`."""

    difficulty: Callable[[], float]
    adapted: Callable[[Task, float], Task]
    observe: Callable[[Sequence[Group]], None]
    state: Callable[[], dict[str, Any]]
    load: Callable[[Mapping[str, Any]], None]

    def __init__(self, game: Game[P], config: GameConfig) -> None:
        self._game, self._config = game, config
        if config.curriculum:
            curriculum = config.curriculum.build(config.hardest, lambda episode: episode.rewards.get("solved", 0) >= 1)
            self.difficulty, self.observe = curriculum.difficulty, curriculum.observe
            self.state, self.load, self.adapted = curriculum.state, curriculum.load, self._easier

    @cached_property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight 1 for `solved`. What has weight 0 is only recorded."""
        first = self._game.start(random.Random(0), self._config.hardest)
        own = {"solved": 1.0, "progress": self._config.progress_weight, "illegal": self._config.illegal_weight}
        return {**own, "moves": 0.0, **dict.fromkeys(self._game.measures(first), 0.0)}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of `train` or `test`."""
        if split == "train":
            return GeneratedTasks(self._config.train_tasks, lambda index: self._task(self._seed("train", index), False))
        if split == "test":
            return self._test
        raise DataError(f"there is no split {split!r}; there are train, test")

    def opening(self, task: Task) -> P:
        """Return the first position of a task."""
        return self._game.start(random.Random(task.data["seed"]), task.data["difficulty"])

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play one game. Returns its rewards."""
        game, config = self._game, self._config
        position = self.opening(task)
        message: Conversation | str = task.prompt
        moves = illegal = 0
        with suppress(ContextFull):  # the game is then over
            while moves + illegal < config.turns and illegal < config.illegal_moves and not game.solved(position):
                move = action_in((await model.reply(message)).text, config.move)
                try:
                    if move is None:
                        raise IllegalMove("The response has no move.")
                    position, moves = game.moved(position, move), moves + 1
                    message = game.shown(position)
                except IllegalMove as error:
                    illegal += 1
                    message = f"Illegal move. {error}"
        model.record("end", game.revealed(position))
        rewards = {"solved": float(game.solved(position)), "progress": game.progress(position)}
        return {**rewards, "illegal": float(illegal), "moves": float(moves), **game.measures(position)}

    def close(self) -> None:
        """Do nothing: no resource is held."""

    @cached_property
    def _test(self) -> Sequence[Task]:
        """The distinct tasks, in the order of the draws. Drawing ends early if new tasks become too rare."""
        wanted, found, last = self._config.test_tasks, dict[str, Task](), 0
        index = 0
        while len(found) < wanted and index - last <= 50 + 10 * len(found):
            task = self._task(self._seed("test", index), True)
            last = last if task.id in found else index
            found.setdefault(task.id, task)
            index += 1
        return tuple(found.values())

    def _seed(self, split: str, index: int) -> int:
        return derive_seed(self._config.seed, f"{self._game.name}-{split}", index)

    def _easier(self, task: Task, difficulty: float) -> Task:
        """Return a task of `train` at a difficulty, which is derived from another one."""
        return self._task(derive_seed(task.data["seed"], "difficulty", int(difficulty)), False, int(difficulty))

    def _task(self, seed: int, test: bool, difficulty: int = 0) -> Task:
        """Return the task of a seed. It is the first of a split among the positions that follow from the seed."""
        game, config = self._game, self._config
        difficulty = difficulty or config.hardest
        for attempt in range(MOST_DRAWS):
            own = derive_seed(seed, "attempt", attempt)
            position = game.start(random.Random(own), difficulty)
            key = game.key(position)
            if held_out(key) == test:
                system: Conversation = (Message("system", config.system),) if config.system else ()
                shown = {"rules": game.rules(difficulty), "position": game.shown(position)}
                prompt = (*system, Message("user", filled(config.prompt, shown)))
                return Task(prompt, {"seed": own, "difficulty": difficulty}, id=key)
        raise DataError(
            f"{game.name}: no position for {'test' if test else 'train'} was found among {MOST_DRAWS:,} at difficulty "
            f"{difficulty}: there are too few positions; raise the difficulty"
        )
