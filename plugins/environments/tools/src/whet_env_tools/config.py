"""The config of the environment `calculator`."""

from typing import Literal

from attrs import field, frozen

from whet.component import Facts
from whet.config.bounds import GROUP, RECORDS, SEED, between
from whet.data.model_info import ModelInfo


@frozen
class CalculatorConfig:
    """Products such as `Compute 47*83.`, with a calculator that is called by writing `calc 47*83`."""

    smallest: int = field(default=11, validator=between(0, 999_999))
    """Smallest factor."""
    largest: int = field(default=99, validator=between(0, 999_999))
    """Largest factor."""
    turns: int = field(default=2, validator=between(1, GROUP))
    """Most answers of the model in an episode; the last one is the final answer whatever it says."""
    reply_role: Literal["user", "tool"] = "user"
    """Role of the calculator's messages; `tool` needs a chat template that knows it."""
    system: str = ""
    """A system message that explains the calculator; empty: none."""
    train_tasks: int = field(default=1_000_000, validator=between(1, RECORDS))
    """Tasks in the split `train`."""
    test_tasks: int = field(default=256, validator=between(1, RECORDS))
    """Most tasks in the split `test`: of the tenth of all products that `train` never shows."""
    seed: int = field(default=0, validator=between(0, SEED))
    """Another seed gives other tasks."""


def facts(config: CalculatorConfig, model: ModelInfo) -> Facts:
    """Say what planning needs to know: answers can be voted on."""
    return Facts(states_answers=True)
