"""The configs of the environments `arithmetic` and `math`."""

from typing import Any

from attrs import field, frozen, validators

from whet.component import Facts
from whet.config.bounds import FACTOR, GROUP, PROCESSES, RECORDS, RETRIES, SECONDS, SEED, above, between
from whet.data.model_info import ModelInfo


@frozen
class ArithmeticConfig:
    """Chains of additions and subtractions such as `Compute 7+8-3+6-1+2.`, made up as they are needed."""

    terms: int = field(default=6, validator=between(2, GROUP))
    """Numbers in a chain."""
    largest_operand: int = field(default=9, validator=between(1, RETRIES))
    """Each number is between 1 and this."""
    largest_total: int = field(default=20, validator=between(1, RETRIES))
    """Every running total is between 0 and this."""
    train_tasks: int = field(default=1_000_000, validator=between(1, RECORDS))
    """Tasks in the split `train`."""
    test_tasks: int = field(default=512, validator=between(1, RECORDS))
    """Tasks in the split `test`: of the tenth of all expressions that `train` never shows."""
    seed: int = field(default=0, validator=between(0, SEED))
    """Another seed gives other tasks."""


def _has_question(instance: object, attribute: Any, value: str) -> None:
    if "{question}" not in value:
        raise ValueError(f"is {value!r:.80}, wanted a text with {{question}} in it")


@frozen
class MathConfig:
    """Questions from a data set, with answers that math-verify compares."""

    dataset: str | dict[str, str] = field(metadata={"path": True})
    """A file, a folder with a file for each split, or a name on the Hugging Face hub; or a file for each split, e.g.
    `{train: a.jsonl, test: b.jsonl}`. A single file makes up whatever split is asked for."""
    subset: str = ""
    """Of a hub data set that has several, e.g. `main`."""
    question: str = "question"
    """Name of the field with the question."""
    answer: str = "answer"
    """Name of the field with the right answer."""
    answer_pattern: str = ""
    r"""Regular expression whose first group is the right answer within that field. Empty: what stands after the last
    `####`, else in the last `\boxed{}`, else the whole field."""
    prompt: str = field(default="{question}\n\nPut your final answer within \\boxed{}.", validator=_has_question)
    """What the model is asked; `{question}` stands for the question."""
    system: str = ""
    """A system message before it; empty: none."""
    boxed_only: bool = False
    r"""Count only answers in `\boxed{}`; else the last number or formula of an answer without one is taken."""
    format_weight: float = field(default=0.0, validator=between(0, FACTOR))
    r"""Weight of the reward `format`, which is 1 for an answer with a `\boxed{}`; 0: there is no such reward."""
    max_records: int = field(default=0, validator=between(0, RECORDS))
    """Use only the first so many records of a split; 0: all."""
    max_bad_records: float = field(default=0.0, validator=[validators.ge(0), validators.le(1)])
    """Share of records that may be left out because they lack a question or an answer that can be graded."""
    graders: int = field(default=1, validator=between(1, PROCESSES))
    """Processes that compare answers which are more than plain numbers."""
    timeout_seconds: float = field(default=5.0, validator=above(0, SECONDS))
    """Processor time of one comparison. An answer that needs more is wrong, and is counted as `grader/undecided`."""


def facts(config: ArithmeticConfig | MathConfig, model: ModelInfo) -> Facts:
    """Say what planning needs to know: answers can be voted on."""
    return Facts(states_answers=True)
