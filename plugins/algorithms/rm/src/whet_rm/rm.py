"""Reward modelling: learn from pairs of responses how good a response is (Ouyang et al. 2022, arXiv:2203.02155).

Left out on purpose: scores of single steps of a response, and heads of more than one number.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from whet.data.metrics import Metric, mean
from whet_ops.algorithms.offline_loop import offline_loop, read_data
from whet_rm.config import RmConfig

if TYPE_CHECKING:
    from whet.interfaces.algorithm import OfflineParts

SQUARED, DEVIATION = "_squared", "_std"


class Rm:
    """The loop: read pairs, train, and validate when due."""

    def __init__(self, config: RmConfig) -> None:
        self.config = config

    def run(self, parts: "OfflineParts") -> None:
        """Run from the first step that is left to the last."""
        offline_loop(parts, read_data(parts), self.config, derive=with_deviations)


def with_deviations(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics with standard deviations in place of means of squares."""
    found = {name: metric for name, metric in metrics.items() if not name.endswith(SQUARED)}
    for name in (name.removesuffix(SQUARED) for name in metrics if name.endswith(SQUARED)):
        variance = metrics[name + SQUARED].number() - metrics[name].number() ** 2
        found[name + DEVIATION] = mean(math.sqrt(max(variance, 0.0)))
    return found
