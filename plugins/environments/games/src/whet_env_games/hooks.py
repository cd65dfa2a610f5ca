"""The hooks of this plugin: the environments `sliding-puzzle`, `code-breaker` and `maze`."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_env_games.config import CodeBreakerConfig, MazeConfig, SlidingPuzzleConfig


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the games."""
    facts = "whet_env_games.config:facts"
    return [
        Component("sliding-puzzle", SlidingPuzzleConfig, "whet_env_games.sliding_puzzle:environment", facts),
        Component("code-breaker", CodeBreakerConfig, "whet_env_games.code_breaker:environment", facts),
        Component("maze", MazeConfig, "whet_env_games.maze:environment", facts),
    ]
