"""The hooks of this plugin: the environments `judge` and `rubric-judge`."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_env_judge.config import JudgeConfig, RubricJudgeConfig


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the environments `judge` and `rubric-judge`."""
    return [
        Component("judge", JudgeConfig, "whet_env_judge.judge:Judge", "whet_env_judge.config:judge_facts"),
        Component(
            "rubric-judge", RubricJudgeConfig, "whet_env_judge.rubric:RubricJudge", "whet_env_judge.config:rubric_facts"
        ),
    ]
