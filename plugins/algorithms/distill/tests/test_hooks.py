"""What `whet check` says of distillation."""

from types import SimpleNamespace

import pytest

from whet.component import Selection
from whet.config.sections import RolloutSection
from whet_distill.config import DistillConfig, DistillDataConfig
from whet_distill.hooks import whet_check_config, whet_losses


@pytest.mark.parametrize("name", ["topk-kl", "full-kl", "sample-kl", "teacher-pg"])
@pytest.mark.parametrize(
    ("options", "problems"),
    [
        ({}, []),
        ({"aggregation": "sequence", "count_empty": True}, []),
        ({"aggregation": "constant", "max_length": 16}, []),
        ({"aggregation": "constant"}, ["algorithm.loss.max_length"]),
        ({"count_empty": True}, ["algorithm.loss.count_empty"]),
    ],
)
def test_an_average_needs_what_it_divides_by(name, options, problems):
    (component,) = (one for one in whet_losses() if one.name == name)
    algorithm = DistillDataConfig(loss=Selection("losses", component, component.config(**options), "whet-distill"))
    whole = SimpleNamespace(algorithm=SimpleNamespace(config=algorithm), rollout=RolloutSection())
    assert [problem.path for problem in whet_check_config(whole)] == problems


@pytest.mark.parametrize(
    ("own_size", "changes", "problems"),
    [
        (0, {}, []),
        (1, {}, ["algorithm.minibatches"]),
        (0, {"count_over": "batch"}, []),
        (0, {"count_over": "batch", "minibatches": 1}, ["algorithm.count_over"]),
    ],
)
def test_minibatches_that_a_step_cannot_fill_or_that_share_nothing_are_refused(own_size, changes, problems):
    (component,) = (one for one in whet_losses() if one.name == "topk-kl")
    loss = Selection("losses", component, component.config(), "whet-distill")
    algorithm = DistillConfig(**{"prompts_per_step": 2, "group_size": 4, "minibatches": 8, "loss": loss, **changes})
    whole = SimpleNamespace(
        algorithm=SimpleNamespace(config=algorithm), rollout=RolloutSection(), model=SimpleNamespace(path=""),
        environments=[SimpleNamespace(name="sums", group_size=own_size)],
    )  # fmt: skip
    assert [problem.path for problem in whet_check_config(whole)] == problems
