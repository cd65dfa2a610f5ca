"""Supervised fine-tuning: minimise the negative log-likelihood of demonstrations.

Left out on purpose: packing and length bins (the backend's affair) and any schedule (the optimizer's).
"""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from whet.data.demonstrations import encode
from whet.data.metrics import Metric, mean
from whet.run.validation import evaluate_all, trained_tokens
from whet_sft.config import SftConfig

if TYPE_CHECKING:
    from whet.component import Spec
    from whet.data.batch import Batch
    from whet.data.model_info import ModelInfo
    from whet.data.offline import Encode
    from whet.interfaces.algorithm import Parts
    from whet.interfaces.backend import Backend


class Sft:
    """The loop: read, learn, and now and then look at data that is not learned from."""

    def __init__(self, config: SftConfig) -> None:
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
            step.log(with_perplexity(backend.train(batch, parts.loss)))
            step.log({"epoch": mean(data.epoch(step.number, config.batch_size))})
            if validation and step.due(config.validate_every):
                step.log(validate(backend, validation, parts.loss))
            if step.due(parts.config.evaluation.every):
                parts.refit(version=step.number)  # the generator plays the evaluation's episodes
            step.finish(batch)


def encoder(config: SftConfig, model: "ModelInfo") -> "Encode":
    """Return what turns a record into a sequence to train on."""
    return partial(encode, names=config.fields, train_on=config.train_on, plain=config.plain)


def validate(backend: "Backend", batches: Iterable["Batch"], loss: "Spec") -> dict[str, Metric]:
    """Give `validation/loss`, as the mean over all trained tokens of all batches, and what else the loss gives."""
    found = with_perplexity(evaluate_all(backend, batches, loss, trained_tokens))
    return {f"validation/{name}": metric for name, metric in found.items() if name != "nll"}


def with_perplexity(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Add exp(mean negative log-likelihood), where the loss gives that mean; it cannot be merged, so it comes last."""
    if "nll" not in metrics:
        return dict(metrics)
    return {**metrics, "perplexity": mean(math.exp(min(metrics["nll"].number(), 700.0)))}
