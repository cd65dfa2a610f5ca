"""What whet-distill offers: the algorithms `distill` and `distill-data`, and their losses."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, LossFacts, Problem
from whet.data.model_info import ModelInfo
from whet.plan.plan import facts_of
from whet_distill.config import (
    DistillConfig,
    DistillDataConfig,
    DivergenceConfig,
    FullKlConfig,
    SampleKlConfig,
    TeacherPgConfig,
    TopkKlConfig,
)  # fmt: skip
from whet_ops.algorithms.config import terms_of
from whet_ops.algorithms.problems import average_problems, minibatch_problems

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_algorithms() -> Iterable[Component]:
    """Offer distillation on the student's own responses, and on the responses of a data set."""
    yield Component("distill", DistillConfig, "whet_distill.distill:Distill", "whet_distill.config:distill_facts")
    yield Component(
        "distill-data", DistillDataConfig, "whet_distill.data:DistillData", "whet_distill.config:distill_data_facts"
    )


@hookimpl
def whet_losses() -> Iterable[Component]:
    """Offer divergences over a few tokens, over all, at the sampled one, and the teacher's opinion as advantages."""
    yield Component("topk-kl", TopkKlConfig, "whet_distill.losses:TopkKl", "whet_distill.config:topk_kl_facts")
    yield Component("full-kl", FullKlConfig, "whet_distill.losses:FullKl", "whet_distill.config:full_kl_facts")
    yield Component("sample-kl", SampleKlConfig, "whet_distill.losses:SampleKl", "whet_distill.config:sample_kl_facts")
    yield Component(
        "teacher-pg", TeacherPgConfig, "whet_distill.losses:TeacherPg", "whet_distill.config:teacher_pg_facts"
    )


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Find environments that are given a teacher and are not there, and numbers that do not go together."""
    section = config.algorithm.config
    for path, loss in terms_of(getattr(section, "loss", None), "algorithm.loss"):
        if isinstance(loss.config, (DivergenceConfig, SampleKlConfig, TeacherPgConfig)):
            yield from average_problems(path, loss.config, config.rollout)
    if not isinstance(section, DistillConfig):
        return
    names = [entry.name or entry.component.name for entry in config.environments]
    for name in section.teachers:
        if name not in names:
            yield Problem(f"algorithm.teachers.{name}", f"there is no such environment; there are {', '.join(names)}")
    read = facts_of(section.loss, ModelInfo(config.model.path, {}), LossFacts).columns_read
    if section.old_logprobs == "trainer" and "advantages" not in read:
        yield Problem(
            "algorithm.old_logprobs", f"has no effect on the loss {section.loss.name}, which reads no advantages"
        )
    yield from minibatch_problems(section, config)
