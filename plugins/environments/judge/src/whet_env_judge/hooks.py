"""The hooks of this plugin: the environment `judge`."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_env_judge.config import JudgeConfig


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the environment `judge`."""
    return [Component("judge", JudgeConfig, "whet_env_judge.judge:Judge", "whet_env_judge.config:judge_facts")]
