"""Reward modelling: learn from pairs of answers how good an answer is (Ouyang et al. 2022, arXiv:2203.02155).

Left out on purpose: scores of single steps of an answer, and heads of more than one number.
"""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from whet.data.metrics import Metric, mean
from whet.run.validation import evaluate_all, sequences
from whet_rm.config import RmConfig

if TYPE_CHECKING:
    from whet.component import Spec
    from whet.data.batch import Batch
    from whet.interfaces.algorithm import Parts
    from whet.interfaces.backend import Backend

SQUARED, DEVIATION = "_squared", "_std"


class Rm:
    """The loop: read pairs, learn, and now and then look at pairs that are not learned from."""

    def __init__(self, config: RmConfig) -> None:
        self.config = config

    def run(self, parts: "Parts") -> None:
        """Run from the first step that is left to the last."""
        config, backend = self.config, parts.backend
        assert parts.data is not None  # what feeds on data gets it
        data = parts.data.prepare()
        validation = data.validation(config.batch_size)

        if validation and parts.steps.done == 0:
            parts.steps.log_start(validate(backend, validation, parts.loss))
        for step in parts.steps:
            batch = data.batch(step.number, config.batch_size)
            step.log(with_deviations(backend.train(batch, parts.loss)))
            step.log({"epoch": mean(data.epoch(step.number, config.batch_size))})
            if validation and step.due(config.validate_every):
                step.log(validate(backend, validation, parts.loss))
            step.finish(batch)


def validate(backend: "Backend", batches: Iterable["Batch"], loss: "Spec") -> dict[str, Metric]:
    """Give what the loss gives, over all batches. `loss` is the mean of theirs, weighted by their pairs."""
    found = with_deviations(evaluate_all(backend, batches, loss, sequences))
    return {f"validation/{name}": metric for name, metric in found.items()}


def with_deviations(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Turn means of squares into deviations around the means, which cannot be merged and so come last."""
    found = {name: metric for name, metric in metrics.items() if not name.endswith(SQUARED)}
    for name in (name.removesuffix(SQUARED) for name in metrics if name.endswith(SQUARED)):
        variance = metrics[name + SQUARED].number() - metrics[name].number() ** 2
        found[name + DEVIATION] = mean(math.sqrt(max(variance, 0.0)))
    return found
