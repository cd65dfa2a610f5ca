"""The configs of the environments `arithmetic` and `math`."""

from typing import Any

from attrs import field, frozen, validators

from whet.component import EnvironmentFacts
from whet.config.bounds import FACTOR, GROUP, PROCESSES, RECORDS, RETRIES, SECONDS, SEED, above, between
from whet.data.model_info import ModelInfo


def _easiest(instance: Any, attribute: Any, value: int) -> None:
    if value and not 2 <= value <= instance.terms:
        raise ValueError(f"is {value}, wanted 0, or from 2 to terms, which is {instance.terms}")


@frozen
class ArithmeticConfig:
    """Chains of additions and subtractions such as `Compute 7+8-3+6-1+2.`, generated on demand."""

    terms: int = field(default=6, validator=between(2, GROUP))
    """Numbers in a chain."""
    largest_operand: int = field(default=9, validator=between(1, RETRIES))
    """Largest number of a chain; the smallest is 1."""
    largest_total: int = field(default=20, validator=between(1, RETRIES))
    """Largest running total; the smallest is 0."""
    train_tasks: int = field(default=1_000_000, validator=between(1, RECORDS))
    """Tasks in the split `train`."""
    test_tasks: int = field(default=512, validator=between(1, RECORDS))
    """Tasks in the split `test`. They come from the tenth of all expressions that `train` does not contain."""
    seed: int = field(default=0, validator=between(0, SEED))
    """Seed of the tasks. Another seed gives other tasks."""
    easiest_terms: int = field(default=0, validator=[between(0, GROUP), _easiest])
    """Numbers in a chain when training begins. Whenever the pass rate of the last 32 groups is at least 0.8, chains get
    one number more, up to `terms`. A checkpoint saves the length. Evaluations always use `terms`. 0: always `terms`."""


def _has_question(instance: object, attribute: Any, value: str) -> None:
    if "{question}" not in value:
        raise ValueError(f"is {value!r:.80}, wanted a text with {{question}} in it")


@frozen
class MathConfig:
    """Questions from a data set. math-verify compares the answers."""

    dataset: str | dict[str, str] = field(metadata={"path": True})
    """A file, a folder with one file for each split, or a name on the Hugging Face hub; or one file for each split,
    e.g. `{train: a.jsonl, test: b.jsonl}`. A single file is used for every split."""
    subset: str = ""
    """The subset of a hub data set that has several subsets, e.g. `main`."""
    question: str = "question"
    """The field with the question."""
    answer: str = "answer"
    """The field with the right answer."""
    answer_pattern: str = ""
    r"""Regular expression whose first group is the right answer within that field. Empty: the text after the last
    `####`, else the text in the last `\boxed{}`, else the whole field."""
    prompt: str = field(default="{question}\n\nPut your final answer within \\boxed{}.", validator=_has_question)
    """The prompt. `{question}` is replaced by the question."""
    system: str = ""
    """A system message before the prompt. Empty: none."""
    boxed_only: bool = False
    r"""Accept only answers in `\boxed{}`. false: without a box, the last number or formula of the response is used."""
    format_weight: float = field(default=0.0, validator=between(0, FACTOR))
    r"""Weight of the reward `format`, which is 1 for a response with a `\boxed{}`. 0: no such reward."""
    max_records: int = field(default=0, validator=between(0, RECORDS))
    """Use only the first records of a split, at most this many. 0: all."""
    max_bad_records: float = field(default=0.0, validator=[validators.ge(0), validators.le(1)])
    """Largest share of records that may be left out because they lack a question or an answer that can be graded."""
    graders: int = field(default=1, validator=between(1, PROCESSES))
    """Grader processes, which compare answers that are not plain numbers."""
    timeout_seconds: float = field(default=5.0, validator=above(0, SECONDS))
    """Most processor time of one comparison. An answer that needs more is wrong and counts as `grader/undecided`."""


def facts(config: ArithmeticConfig | MathConfig, model: ModelInfo) -> EnvironmentFacts:
    """Return the facts for planning: final answers for majority votes, and the splits as far as the config has them."""
    if isinstance(config, ArithmeticConfig):
        return EnvironmentFacts(states_answers=True, splits=("train", "test"))
    return EnvironmentFacts(
        states_answers=True, splits=tuple(config.dataset) if isinstance(config.dataset, dict) else None
    )
