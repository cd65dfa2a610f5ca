"""The config of the environment `calculator`."""

from typing import Literal

from attrs import field, frozen

from whet.component import EnvironmentFacts
from whet.config.bounds import GROUP, RECORDS, SEED, between
from whet.data.model_info import ModelInfo


@frozen
class CalculatorConfig:
    """Products such as `Compute 47*83.`, and a calculator that the model calls by writing `calc 47*83`."""

    smallest: int = field(default=11, validator=between(0, 999_999))
    """Smallest factor."""
    largest: int = field(default=99, validator=between(0, 999_999))
    """Largest factor."""
    turns: int = field(default=2, validator=between(1, GROUP))
    """Most responses of the model in an episode. The last response is graded, even if it is a call."""
    reply_role: Literal["user", "tool"] = "user"
    """Role of the calculator's messages. `tool` needs a chat template that supports this role."""
    system: str = ""
    """A system message that explains the calculator. Empty: none."""
    train_tasks: int = field(default=1_000_000, validator=between(1, RECORDS))
    """Tasks in the split `train`."""
    test_tasks: int = field(default=256, validator=between(1, RECORDS))
    """Most tasks in the split `test`. They come from the tenth of all products that `train` does not contain."""
    seed: int = field(default=0, validator=between(0, SEED))
    """Seed of the tasks. Another seed gives other tasks."""


def facts(config: CalculatorConfig, model: ModelInfo) -> EnvironmentFacts:
    """Return the facts for planning: final answers for majority votes, and the splits."""
    return EnvironmentFacts(states_answers=True, splits=("train", "test"))
