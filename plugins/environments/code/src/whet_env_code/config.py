"""The configs of the environments `code` and `tiny-functions`, and their facts for planning."""

from attrs import field, frozen, validators

from whet.component import EnvironmentFacts, Selection
from whet.config.bounds import FACTOR, GROUP, PROCESSES, RECORDS, SEED, between
from whet.config.sections import selection
from whet.data.model_info import ModelInfo
from whet_data.quoting import template_with
from whet_sandbox.limits import Limits

TOOL_PROMPT = """You can run Python before you answer. Write code in a block that begins with ```run and ends with \
```, as the last thing of your message; you then get its output. Variables are kept. When you are ready, write the \
whole program in a block that begins with ```python."""


@frozen
class CodeConfig:
    """Programs for the tasks of a data set, graded by hidden tests in sandboxes."""

    dataset: str | dict[str, str] = field(validator=validators.min_len(1), metadata={"path": True})
    """A file, a folder with one file for each split, or a name on the Hugging Face hub; or one file for each split,
    e.g. `{train: a.jsonl, test: b.jsonl}`. A single file is used for every split."""
    subset: str = ""
    """The subset of a hub data set that has several subsets."""
    question: str = "prompt"
    """The field with the task."""
    before: str = "prompt"
    """The field with the beginning of the program: imports and the head of the function, as in HumanEval. A response
    may repeat or continue it. A question in words is left out. Empty: none."""
    tests: str = "test"
    """The field with the tests: code with `assert` and, where it has one, a function `check(candidate)`; or a list of
    lines of code."""
    setup: str = ""
    """A field with code that runs before the tests, e.g. `test_setup_code`. Empty: none."""
    entry_point: str = "entry_point"
    """The field with the name of the function that is graded. A record without it is graded on all functions that its
    tests call and nobody defines."""
    cases: str = ""
    """Instead of tests: the field with `{"inputs": [...], "outputs": [...]}`, also as JSON text. The program reads each
    input from stdin; its stdout must be the output, apart from white space at the ends of lines and of the text."""
    solution: str = "canonical_solution"
    """The field with a right program. Only `check_solutions` reads it."""
    check_solutions: bool = False
    """Whether each record's own solution is graded when a split is loaded. Records whose solution fails are bad. It
    takes about 30 ms a record."""
    prompt: str = field(default="{question}", validator=template_with(("question",), ("question",)))
    """The prompt. `{question}` is replaced by the task."""
    system: str = ""
    """A system message before the prompt. Empty: none."""
    turns: int = field(default=1, validator=between(1, GROUP))
    """Most responses of the model in an episode. With more than one, the model can run Python in all but the last."""
    tool_prompt: str = TOOL_PROMPT
    """What explains the Python tool, after the prompt, if `turns` is more than 1."""
    tool_output: int = field(default=2000, validator=between(1, RECORDS))
    """Most characters of the tool's output that the model sees."""
    tool_sessions: int = field(default=64, validator=between(1, PROCESSES))
    """Most interpreters of the tool at a time. Other episodes wait."""
    partial_weight: float = field(default=0.0, validator=between(0, FACTOR))
    """Weight of the reward `passed`, the share of tests that a program passes. Then all tests run; otherwise they end
    with the first that fails. 0: no such reward."""
    max_records: int = field(default=0, validator=between(0, RECORDS))
    """Use only the first records of a split, at most this many. 0: all."""
    max_bad_records: float = field(default=0.0, validator=[validators.ge(0), validators.le(1)])
    """Largest share of records that may be left out because they lack a task or tests, or their solution fails."""
    limits: Limits = field(factory=Limits)
    """Limits of a program, over all of its tests together, and of the tool in each turn. With `cases`, `cpu_seconds`
    holds for each input, as a program starts anew for it, and `wall_seconds` for all of them together."""
    sandbox: Selection = selection("sandboxes", "namespaces")
    """Where programs run. What it needs is checked before a run."""


@frozen
class TinyFunctionsConfig:
    """Functions such as `f(n) = |3*n-4|+2`, generated, graded by hidden tests in sandboxes. For a small model."""

    train_tasks: int = field(default=1_000_000, validator=between(1, RECORDS))
    """Tasks in the split `train`."""
    test_tasks: int = field(default=64, validator=between(1, RECORDS))
    """Most tasks in the split `test`. They are of the tenth of all functions that `train` does not contain."""
    seed: int = field(default=0, validator=between(0, SEED))
    """Seed of the tasks. Another seed gives other tasks."""
    limits: Limits = field(factory=Limits)
    """Limits of a program, over all of its tests together."""
    sandbox: Selection = selection("sandboxes", "namespaces")
    """Where programs run. What it needs is checked before a run."""


def facts(config: CodeConfig | TinyFunctionsConfig, model: ModelInfo) -> EnvironmentFacts:
    """Return the facts for planning: the splits as far as the config has them."""
    if isinstance(config, TinyFunctionsConfig):
        return EnvironmentFacts(states_answers=False, splits=("train", "test"))
    return EnvironmentFacts(
        states_answers=False, splits=tuple(config.dataset) if isinstance(config.dataset, dict) else None
    )
