"""The config of the environment `judge`, and its facts for planning."""

from typing import Any, Literal

from attrs import evolve, field, frozen, validators

from whet.component import EnvironmentFacts, RoleNeed, Selection
from whet.config.bounds import FACTOR, RECORDS, above, between
from whet.config.sections import optional_selection
from whet.data.model_info import ModelInfo
from whet.plan.plan import facts_of


def _one_source(instance: "JudgeConfig", attribute: Any, value: object) -> None:
    if bool(value) == (instance.environment is not None):
        found = "both" if value else "neither"
        raise ValueError(f"{found} of dataset and environment given; wanted one: prompts, or what is to be judged")


def _bounds(instance: object, attribute: Any, value: tuple[float, float] | None) -> None:
    if value is not None and not value[0] < value[1]:
        raise ValueError(f"is {list(value)}, wanted the lower bound, then the upper one")


_WEIGHT: Any = between(-FACTOR, FACTOR)
_CLIP: Any = validators.optional(validators.deep_iterable(_WEIGHT))


@frozen
class JudgeConfig:
    """Rewards a response by the value that a further model of the run (a role) computes, e.g. a reward model."""

    role: str = field(default="judge", validator=validators.min_len(1))
    """The role of the judge model. The judge's reward has the same name."""
    environment: Selection | None = optional_selection("environments")
    """An environment whose episodes are judged, e.g. `{use: arithmetic}`. Its own rewards are recorded, too."""
    dataset: str | dict[str, str] = field(default="", validator=_one_source, metadata={"path": True})
    """Instead of an environment: a file of prompts, a folder with one file for each split, or a name on the Hugging
    Face hub; or one file for each split, e.g. `{train: a.jsonl, test: b.jsonl}`. A single file is used for every
    split."""
    subset: str = ""
    """The subset of a hub data set that has several subsets."""
    question: str = "prompt"
    """The field with the prompt: a string, or a list of messages."""
    system: str = ""
    """A system message before the prompt. Empty: none."""
    max_records: int = field(default=0, validator=between(0, RECORDS))
    """Use only the first records of a split, at most this many. 0: all."""
    max_bad_records: float = field(default=0.0, validator=[validators.ge(0), validators.le(1)])
    """Largest share of records that may be left out because they have no prompt."""
    mean: float = field(default=0.0, validator=_WEIGHT)
    """Subtracted from the judge's value. E.g. the mean of the values on a held-out set."""
    scale: float = field(default=1.0, validator=above(0, FACTOR))
    """The difference is divided by this. E.g. the standard deviation of the values on a held-out set."""
    clip: tuple[float, float] | None = field(default=None, validator=[_bounds, _CLIP])
    """Bounds of the scaled reward, e.g. `[-5, 5]`. null: none."""
    rank: bool = False
    """Whether the reward is the share of the group's other responses that the judge values lower, from 0 to 1; an equal
    value counts half. The scale of the judge's values then does not matter. The value is recorded as `ROLE_value`."""
    too_long: Literal["refuse", "cut"] = "refuse"
    """How to treat a conversation that has more tokens than the judge has positions. `refuse`: a run is refused if
    `rollout.max_context` allows such a conversation. If a conversation has more tokens for the judge's tokenizer than
    for the policy's, its group is dropped with an error. `cut`: the judge reads only the end of the conversation, and a
    warning counts such conversations."""
    judge_weight: float = field(default=1.0, validator=_WEIGHT)
    """Weight of the judge's reward in the training reward."""
    environment_weight: float = field(default=0.0, validator=_WEIGHT)
    """Factor on the weights of the environment's own rewards. 0: these rewards are recorded, but not trained on."""


def judge_facts(config: JudgeConfig, model: ModelInfo) -> EnvironmentFacts:
    """Return the roles that are needed: the judge, and the roles of the wrapped environment."""
    within = (
        facts_of(config.environment, model, EnvironmentFacts)
        if config.environment
        else EnvironmentFacts(
            states_answers=False, splits=tuple(config.dataset) if isinstance(config.dataset, dict) else None
        )
    )
    need = within.roles.get(config.role, RoleNeed())
    whole = need.conversations or config.too_long == "refuse"
    judge = RoleNeed(need.outputs | {"values"}, need.trained, whole)
    return evolve(within, roles={**within.roles, config.role: judge})
