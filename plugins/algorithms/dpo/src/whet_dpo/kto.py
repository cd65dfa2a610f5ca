"""Preference optimisation on single answers: Kahneman-Tversky optimisation.

Ethayarajh et al. 2024 (arXiv:2402.01306). Left out on purpose: a reference that follows the policy during the run.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from whet.data.metrics import Metric, mean
from whet.data.model_info import read_model
from whet_dpo.baseline import kl_baseline
from whet_dpo.config import KtoConfig, reads_baseline, source
from whet_dpo.loss_config import BASELINE, REFERENCE
from whet_dpo.reference import precomputed
from whet_dpo.validation import validate
from whet_dpo.whole import WholeBatch

if TYPE_CHECKING:
    from whet.data.batch import Batch
    from whet.interfaces.algorithm import Parts


class Kto:
    """The loop: read answers, estimate what they are compared with, learn, and now and then validate.

    The baseline is a number of the whole batch, so it is computed here and not in the loss, which sees a part.
    """

    def __init__(self, config: KtoConfig) -> None:
        self.config = config

    def run(self, parts: "Parts") -> None:
        """Run from the first step that is left to the last."""
        config, backend = self.config, parts.backend
        assert parts.data is not None  # what feeds on data gets it
        data = parts.data.prepare()
        model = read_model(parts.chat.folder)
        reference, compared = source(config, model), reads_baseline(config, model)
        if reference == "precomputed":
            data = precomputed(parts, data, config.batch_size)
        validation = data.validation(config.batch_size)

        whole = WholeBatch(parts, config.loss)

        def prepare(batch: "Batch", step: int = 0) -> "Batch":
            zeros = np.zeros(batch.sequences, np.float32)
            batch = batch.with_columns(**{BASELINE: kl_baseline(backend, batch) if compared else zeros})
            if reference == "on-the-fly":
                scores = backend.score(batch, ("logprobs",), "reference")["logprobs"]
                batch = batch.with_columns(**{REFERENCE: scores})
            return whole(batch, step)

        if validation and parts.steps.done == 0:
            parts.steps.log_start(with_margins(validate(backend, validation, parts.loss, prepare), "validation/"))
        for step in parts.steps:
            batch = prepare(data.batch(step.number, config.batch_size), step.number)
            step.log(with_margins(backend.train(batch, parts.loss)))
            step.log({"epoch": mean(data.epoch(step.number, config.batch_size))})
            if validation and step.due(config.validate_every):
                step.log(with_margins(validate(backend, validation, parts.loss, prepare), "validation/"))
            if step.due(parts.config.evaluation.every):
                parts.refit(version=step.number)  # the generator plays the evaluation's episodes
            step.finish(batch)


def with_margins(metrics: Mapping[str, Metric], prefix: str = "") -> dict[str, Metric]:
    """Add the difference of the mean rewards, where there are both; it cannot be merged, so it comes last."""
    chosen, rejected = (metrics.get(f"{prefix}rewards/{name}") for name in ("chosen", "rejected"))
    if chosen is None or rejected is None or not (float(chosen.count) and float(rejected.count)):
        return dict(metrics)
    return {**metrics, f"{prefix}rewards/margins": mean(chosen.number() - rejected.number())}
