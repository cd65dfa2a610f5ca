"""The hooks of this plugin: the environment `rewarded`, and the rewards that it combines."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_env_rewards import config


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the environment `rewarded`."""
    target = "whet_env_rewards.rewarded:Rewarded"
    return [Component("rewarded", config.RewardedConfig, target, "whet_env_rewards.config:facts")]


@hookimpl
def whet_rewards() -> Iterable[Component]:
    """Offer the rewards."""
    return [
        Component("all-of", config.AllConfig, "whet_env_rewards.combined:All"),
        Component("any-of", config.AnyConfig, "whet_env_rewards.combined:Any"),
        Component("tag-format", config.FormatConfig, "whet_env_rewards.style:Format"),
        Component("repetition", config.RepetitionConfig, "whet_env_rewards.style:Repetition"),
        Component("overlong", config.OverlongConfig, "whet_env_rewards.lengths:Overlong"),
        Component("cosine-length", config.CosineLengthConfig, "whet_env_rewards.lengths:CosineLength"),
        Component("group-length", config.GroupLengthConfig, "whet_env_rewards.lengths:GroupLength"),
        Component("exact-match", config.ExactMatchConfig, "whet_env_rewards.answers:ExactMatch"),
        Component("fuzzy-match", config.FuzzyMatchConfig, "whet_env_rewards.answers:FuzzyMatch"),
        Component("multiple-choice", config.MultipleChoiceConfig, "whet_env_rewards.answers:MultipleChoice"),
        Component("answer-line", config.AnswerLineConfig, "whet_env_rewards.dapo:AnswerLine"),
        Component("json-schema", config.JsonSchemaConfig, "whet_env_rewards.json_schema:JsonSchema"),
    ]
