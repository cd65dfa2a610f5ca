"""The configs of the rewards and of the environment `rewarded`, and its facts for planning."""

from typing import Any, Literal

from attrs import field, frozen, validators

from whet.component import EnvironmentFacts, Selection
from whet.config.bounds import FACTOR, GROUP, PROCESSES, SECONDS, TOKENS, above, between
from whet.config.sections import selection
from whet.data.model_info import ModelInfo
from whet_data.source import SourceConfig, facts_within

_WEIGHT: Any = between(-FACTOR, FACTOR)


@frozen
class RewardSection:
    """One reward. Keys that are not named here belong to the reward."""

    component: Selection = selection("rewards", inline=True)
    """The reward."""
    name: str = field(default="", validator=validators.matches_re(r"[\w-]*"))
    """Its name in metrics and records; by default the component's."""
    weight: float = field(default=1.0, validator=_WEIGHT)
    """Its weight in the training reward. 0: it is recorded, but not trained on."""

    @property
    def label(self) -> str:
        """Return the name under which the reward is recorded."""
        return self.name or self.component.name


def _own_names(instance: object, attribute: Any, value: list[RewardSection]) -> None:
    names = [section.label for section in value]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"has two rewards with the name {twice[0]!r}; give one of them another `name`")


@frozen
class RewardedConfig(SourceConfig):
    """Adds rewards to the episodes of another environment, or to the responses to the prompts of a data set."""

    rewards: list[RewardSection] = field(kw_only=True, validator=[validators.min_len(1), _own_names])
    """The rewards, each with `use`, `weight` and its own keys."""
    environment_weight: float = field(default=1.0, validator=_WEIGHT)
    """Factor on the weights of the environment's own rewards. 0: these rewards are recorded, but not trained on."""
    truncation_factor: float = field(default=1.0, validator=between(0, 1))
    """Factor on the whole reward of an episode with a response that was cut by its length. 0: such episodes get
    nothing. As `stop_properly_penalty_coef` in NeMo RL. The difference is the reward `truncation`."""


def facts(config: RewardedConfig, model: ModelInfo) -> EnvironmentFacts:
    """Return the facts of the wrapped environment."""
    return facts_within(config, model)


@frozen
class AllConfig:
    """The product of rewards: 1 only if all of them are 1. E.g. right, and in the right format."""

    of: list[RewardSection] = field(kw_only=True, validator=validators.min_len(1))
    """The rewards. Their weights do not matter."""


@frozen
class AnyConfig:
    """The largest of several rewards. E.g. right by one of two rules."""

    of: list[RewardSection] = field(kw_only=True, validator=validators.min_len(1))
    """The rewards. Their weights do not matter."""


_TAGS: Any = [validators.min_len(1), validators.deep_iterable(validators.matches_re(r"[A-Za-z][\w-]*"))]


@frozen
class FormatConfig:
    """1 if a response consists of `<think>...</think>` and `<answer>...</answer>` and nothing else."""

    tags: list[str] = field(factory=lambda: ["think", "answer"], validator=_TAGS)
    """The tags, in this order. Only white space may stand between, before and after them."""
    opened: bool = False
    """Whether the prompt ends with the first opening tag, so that responses begin inside it."""
    partial: bool = False
    """Whether the reward is instead the share of opening and closing tags that occur exactly once, as the tag count
    reward of open-r1."""


@frozen
class RepetitionConfig:
    """The share of phrases that occurred before, from 0 to below 1. Its weight should be negative."""

    words: int = field(default=3, validator=between(1, GROUP))
    """Words of a phrase."""


@frozen
class OverlongConfig:
    """DAPO's soft penalty of long responses, from 0 down to -1. The length counts all turns of an episode."""

    longest: int = field(validator=between(1, TOKENS))
    """Tokens from which on the penalty is -1."""
    buffer: int = field(validator=between(1, TOKENS))
    """Tokens before `longest` over which the penalty grows."""

    def __attrs_post_init__(self) -> None:
        """Refuse a buffer that begins before the response."""
        if self.buffer > self.longest:
            raise ValueError(f"buffer is {self.buffer}, wanted at most longest, which is {self.longest}")


def _bounds() -> Any:
    return [validators.min_len(2), validators.max_len(2), validators.deep_iterable(_WEIGHT)]


@frozen
class CosineLengthConfig:
    """A reward that falls with the length of right responses, and rises with that of wrong ones, along a cosine."""

    longest: int = field(validator=between(1, TOKENS))
    """Tokens at which the second value of each pair is reached."""
    right: tuple[float, float] = field(default=(1.0, 0.5), validator=_bounds())
    """The reward of right responses of length 0 and of length `longest`."""
    wrong: tuple[float, float] = field(default=(-1.0, -0.5), validator=_bounds())
    """The reward of wrong responses of length 0 and of length `longest`."""
    decides: str = field(default="correct", validator=validators.min_len(1))
    """The reward that decides what is right: 1 or more."""


@frozen
class GroupLengthConfig:
    """Compares the lengths of a group's responses: 0.5 for the shortest one, -0.5 for the longest one.

    A wrong response gets no more than 0.
    """

    decides: str = field(default="correct", validator=validators.min_len(1))
    """The reward that decides what is right: 1 or more."""


@frozen
class AnswerConfig:
    """Where a response has its answer, and what it is compared with."""

    answer: Literal["response", "tag", "boxed", "line"] = "response"
    r"""Where the answer is. `response`: the whole response. `tag`: the last `<answer>...</answer>`. `boxed`: the last
    `\boxed{...}`. `line`: the last line that begins with `Answer:`."""
    tag: str = field(default="answer", validator=validators.matches_re(r"[A-Za-z][\w-]*"))
    """The tag, for `answer: tag`."""
    gold: str = field(default="answer", validator=validators.min_len(1))
    """The key of the task's data with the right answer, or with a list of right answers."""


@frozen
class ExactMatchConfig(AnswerConfig):
    """1 if the answer is the right one."""

    ignoring: Literal["nothing", "style", "signs"] = "style"
    """What does not matter. `nothing`: white space at the ends. `style`: case, punctuation, articles and white space,
    as in SQuAD. `signs`: everything but letters and digits, and case. Both keep `-`, `.` and `/` before a digit, and
    signs between digits, except the comma of thousands: -1.5 is not 15, and 2^3 not 23. If nothing were left of an
    answer, what does not matter counts: `A` is not `The`."""


@frozen
class FuzzyMatchConfig(AnswerConfig):
    """How much the answer resembles the right one, from 0 to 1."""

    measure: Literal["f1", "edits"] = "f1"
    """`f1`: of words, as in SQuAD. `edits`: 1 - edit distance / length of the longer one, in characters."""
    at_least: float = field(default=0.0, validator=between(0, 1))
    """The reward is 1 from this value on, and 0 below. 0: the reward is the value."""


@frozen
class MultipleChoiceConfig:
    r"""1 if the last `Answer: C`, `\boxed{C}` or `<answer>C</answer>` names the right letter."""

    choices: int = field(default=4, validator=between(2, 26))
    """Number of choices. Four are the letters from A to D."""
    gold: str = field(default="answer", validator=validators.min_len(1))
    """The key of the task's data with the right letter, or with its number, counted from 0."""


@frozen
class AnswerLineConfig:
    """DAPO's rule: the last `Answer:` near the end, normalised, must equal the right answer."""

    right: float = field(default=1.0, validator=_WEIGHT)
    """The reward of a right answer."""
    wrong: float = field(default=-1.0, validator=_WEIGHT)
    """The reward of a wrong or missing answer."""
    characters: int = field(default=300, validator=between(1, 10_000))
    """Only so many last characters of a response are read."""
    gold: str = field(default="answer", validator=validators.min_len(1))
    """The key of the task's data with the right answer."""


def _one_schema(instance: "JsonSchemaConfig", attribute: Any, value: str) -> None:
    if bool(value) == bool(instance.schema):
        raise ValueError(f"{'both' if value else 'neither'} of schema and schema_key given; wanted one")


@frozen
class JsonSchemaConfig:
    """1 if a response is JSON that fits a schema."""

    schema: dict[str, Any] = field(factory=dict)
    """The JSON schema."""
    schema_key: str = field(default="", validator=_one_schema)
    """Instead of `schema`: the key of the task's data with the schema, as text or as an object."""
    fenced: bool = True
    """Whether the last block between lines of three or more backquotes is read, if there is one."""
    parsed: float = field(default=0.0, validator=between(0, 1))
    """The reward of JSON that does not fit the schema."""
    graders: int = field(default=1, validator=between(1, PROCESSES))
    """Processes that parse and compare."""
    timeout_seconds: float = field(default=5.0, validator=above(0, SECONDS))
    """Most processor time of one response. A response that needs more gets 0."""
