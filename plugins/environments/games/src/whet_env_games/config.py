"""The configs of the games, and their facts for planning."""

from typing import Any, Literal

from attrs import field, frozen

from whet.component import EnvironmentFacts
from whet.config.bounds import FACTOR, GROUP, RECORDS, SEED, between
from whet.data.model_info import ModelInfo
from whet_data.quoting import template_with
from whet_ops.curriculum import CurriculumConfig


def _no_harder(instance: "GameConfig", attribute: Any, value: CurriculumConfig | None) -> None:
    if value is not None and not instance.simplest <= value.easiest <= instance.hardest:
        raise ValueError(f"has easiest {value.easiest}, wanted from {instance.simplest} to {instance.hardest}")


@frozen(kw_only=True)
class GameConfig:
    """The settings that all games have."""

    turns: int = field(default=16, validator=between(1, GROUP))
    """Most responses of the model in a game. A response with an illegal move counts, too."""
    illegal_moves: int = field(default=3, validator=between(1, GROUP))
    """The game ends with this many illegal moves, or responses without a move."""
    illegal_weight: float = field(default=0.0, validator=between(-FACTOR, 0))
    """Weight of the reward `illegal`, the number of illegal moves. E.g. -0.1 is a price of 0.1 for each."""
    progress_weight: float = field(default=0.0, validator=between(0, FACTOR))
    """Weight of the reward `progress`: how near the end of the game is to the solution, from 0 to 1."""
    prompt: str = field(default="{rules}\n\n{position}", validator=template_with(("rules", "position"), ("position",)))
    """The first message. `{rules}` and `{position}` are replaced by the rules of the game and the first position."""
    move: Literal["tag", "line"] = "tag"
    """Where a response has its move. `tag`: in the last `<action>...</action>`, as in NeMo RL. `line`: it is the last
    line that is not empty."""
    system: str = ""
    """A system message before the prompt. Empty: none."""
    train_tasks: int = field(default=1_000_000, validator=between(1, RECORDS))
    """Tasks in the split `train`."""
    test_tasks: int = field(default=128, validator=between(1, RECORDS))
    """Most tasks in the split `test`. They are of the tenth of all positions that `train` does not contain."""
    seed: int = field(default=0, validator=between(0, SEED))
    """Seed of the tasks. Another seed gives other tasks."""
    curriculum: CurriculumConfig | None = field(default=None, validator=_no_harder)
    """Training begins with easier games. null: all games have the full difficulty."""

    @property
    def simplest(self) -> int:
        """Return the lowest difficulty that a game can have."""
        return 1

    @property
    def hardest(self) -> int:
        """Return the difficulty of tasks without a curriculum."""
        raise NotImplementedError


@frozen(kw_only=True)
class SlidingPuzzleConfig(GameConfig):
    """A sliding puzzle: all is seen, and moves must be planned. Its difficulty is `shuffle`."""

    rows: int = field(default=3, validator=between(2, 10))
    """Rows of the board."""
    columns: int = field(default=3, validator=between(2, 10))
    """Columns of the board."""
    shuffle: int = field(default=8, validator=between(1, GROUP))
    """Number of random moves from the solved board to the first position. No move takes the one before it back."""

    @property
    def hardest(self) -> int:
        """Return the number of random moves."""
        return self.shuffle


@frozen(kw_only=True)
class CodeBreakerConfig(GameConfig):
    """A code to break, as in Mastermind: what is hidden must be inferred. Its difficulty is `length`."""

    length: int = field(default=4, validator=between(1, 16))
    """Digits of the code."""
    digits: int = field(default=6, validator=between(2, 10))
    """The code has the digits from 0 to one below this number. A digit may occur several times."""

    @property
    def hardest(self) -> int:
        """Return the number of digits of the code."""
        return self.length


@frozen(kw_only=True)
class MazeConfig(GameConfig):
    """A maze of which only the next steps are seen: it must be explored and remembered. Its difficulty is `size`."""

    turns: int = field(default=32, validator=between(1, GROUP))
    """Most responses of the model in a game. A response with an illegal move counts, too."""
    size: int = field(default=5, validator=between(2, 64))
    """Rows and columns of the maze."""
    compass: bool = True
    """Whether the model is told how far the exit is, as the crow flies."""

    @property
    def simplest(self) -> int:
        """Return the size of the smallest maze."""
        return 2

    @property
    def hardest(self) -> int:
        """Return the number of rows and columns."""
        return self.size


def facts(config: GameConfig, model: ModelInfo) -> EnvironmentFacts:
    """Return the facts for planning: the splits. No answer can be voted on."""
    return EnvironmentFacts(states_answers=False, splits=("train", "test"))
