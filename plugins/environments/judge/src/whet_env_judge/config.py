"""The config of the environment `judge`, and what planning needs to know of it."""

from typing import Any, Literal

from attrs import field, frozen, validators

from whet.component import Facts, RoleNeed, Selection
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
    """Rewards an answer by what a further model, a role of the run, says it is worth; e.g. a reward model."""

    role: str = field(default="judge", validator=validators.min_len(1))
    """The role that judges; its reward has the same name."""
    environment: Selection | None = optional_selection("environments")
    """An environment whose tasks are played and judged, e.g. `{use: arithmetic}`; its own rewards stand beside."""
    dataset: str | dict[str, str] = field(default="", validator=_one_source, metadata={"path": True})
    """Instead of an environment: a file of prompts, a folder with a file for each split, or a name on the Hugging Face
    hub; or a file for each split, e.g. `{train: a.jsonl, test: b.jsonl}`. A single file makes up whatever split is
    asked for."""
    subset: str = ""
    """Of a hub data set that has several."""
    question: str = "prompt"
    """Name of the field with the prompt: a string, or a list of messages."""
    system: str = ""
    """A system message before it; empty: none."""
    max_records: int = field(default=0, validator=between(0, RECORDS))
    """Use only the first so many records of a split; 0: all."""
    max_bad_records: float = field(default=0.0, validator=[validators.ge(0), validators.le(1)])
    """Share of records that may be left out because they have no prompt."""
    mean: float = field(default=0.0, validator=_WEIGHT)
    """Is taken from the judge's value, e.g. its mean on a held-out set."""
    scale: float = field(default=1.0, validator=above(0, FACTOR))
    """The rest is divided by this, e.g. its deviation there."""
    clip: tuple[float, float] | None = field(default=None, validator=[_bounds, _CLIP])
    """Bounds of the reward after that, e.g. `[-5, 5]`; null: none."""
    too_long: Literal["refuse", "cut"] = "refuse"
    """What happens to a conversation for which the judge has too few positions. `refuse`: the run, where
    `rollout.max_context` allows for such a one; and where it has more tokens for the judge than for the policy, the
    group is dropped with an error. `cut`: the judge reads its end alone, and a warning says how often."""
    judge_weight: float = field(default=1.0, validator=_WEIGHT)
    """Weight of the judge's reward in the sum that is learned from."""
    environment_weight: float = field(default=0.0, validator=_WEIGHT)
    """Factor on the weights of the environment's own rewards. 0: they are recorded, and not learned from."""


def judge_facts(config: JudgeConfig, model: ModelInfo) -> Facts:
    """Ask for the judge, and for what the environment within asks for."""
    within = facts_of(config.environment, model) if config.environment else Facts(states_answers=False)
    need = within.roles.get(config.role, RoleNeed())
    whole = need.conversations or config.too_long == "refuse"
    judge = RoleNeed(need.outputs | {"values"}, need.trained, whole)
    return Facts(roles={**within.roles, config.role: judge}, states_answers=within.states_answers)
