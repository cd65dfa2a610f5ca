"""What `whet check` says of distillation."""

from types import SimpleNamespace

import pytest

from whet.component import Selection
from whet.config.sections import RolloutSection
from whet_distill.config import DistillDataConfig
from whet_distill.hooks import whet_check_config, whet_losses


@pytest.mark.parametrize("name", ["topk-kl", "full-kl", "teacher-pg"])
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
