"""The config sections that algorithms share."""

import math

import pytest

from whet.config.explain import describe
from whet.config.structure import structure
from whet.errors import ConfigError
from whet_ops.algorithms.config import LikelihoodSection


def test_the_smallest_reward_of_a_right_response_may_be_minus_infinity() -> None:
    made = structure({"weight": 0.1, "at_least": -math.inf}, LikelihoodSection, None)
    assert made.at_least == -math.inf
    (doc,) = [doc for doc in describe(LikelihoodSection) if doc.name == "at_least"]
    assert doc.allowed == "at most 1000000.0"
    assert "`-.inf`: all responses" in doc.doc
    for value in (math.inf, math.nan):
        with pytest.raises(ConfigError):
            structure({"at_least": value}, LikelihoodSection, None)
