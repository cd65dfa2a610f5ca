from typing import Any

from whet.data.records import Task
from whet_env_games import code_breaker, maze, sliding_puzzle
from whet_env_games.config import CodeBreakerConfig, MazeConfig, SlidingPuzzleConfig
from whet_env_games.playing import GameEnvironment
from whet_ops.curriculum import CurriculumConfig
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.environment import EnvironmentContract


def tagged(moves: list[str]) -> list[str]:
    return [f"I think.\n<action>{move}</action>" for move in moves]


class TestPlugin(ComponentContract):
    hooks = "whet_env_games.hooks"


class GameContract(EnvironmentContract):
    splits = ("train", "test")
    states_answers = False

    def gold(self, task: Task) -> list[str]:
        return tagged(self.solution(self.make().opening(task)))

    def solution(self, opening: Any) -> list[str]:
        raise NotImplementedError


class TestSlidingPuzzle(GameContract):
    config = SlidingPuzzleConfig()

    def make(self) -> GameEnvironment[Any]:
        return sliding_puzzle.environment(self.config)

    def solution(self, opening: Any) -> list[str]:
        return sliding_puzzle.solution(opening)


class TestSlidingPuzzleWithACurriculum(TestSlidingPuzzle):
    config = SlidingPuzzleConfig(curriculum=CurriculumConfig(easiest=2, window=2))


class TestCodeBreaker(GameContract):
    def make(self) -> GameEnvironment[Any]:
        return code_breaker.environment(CodeBreakerConfig())

    def solution(self, opening: Any) -> list[str]:
        return [opening.secret]


class TestMaze(GameContract):
    def make(self) -> GameEnvironment[Any]:
        return maze.environment(MazeConfig(curriculum=CurriculumConfig(easiest=2, by="step", steps=8)))

    def solution(self, opening: Any) -> list[str]:
        return maze.way(opening)
