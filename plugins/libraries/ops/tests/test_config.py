"""The config sections that algorithms share."""

import math

import pytest

from whet.config.structure import structure
from whet.errors import ConfigError
from whet_ops.algorithms.config import LikelihoodSection


def test_the_smallest_reward_of_a_right_response_may_be_minus_infinity() -> None:
    made = structure({"weight": 0.1, "at_least": -math.inf}, LikelihoodSection, None)
    assert made.at_least == -math.inf
    for value in (1.1e6, math.inf, math.nan):
        with pytest.raises(ConfigError):
            structure({"at_least": value}, LikelihoodSection, None)
