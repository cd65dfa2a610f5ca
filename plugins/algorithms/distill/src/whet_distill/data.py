"""Off-policy distillation: learn what a teacher would have said in the place of a data set's answers.

Hinton et al. 2015 (arXiv:1503.02531), per token of a language model; the data may have been written by anybody.
"""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from whet.data.demonstrations import encode
from whet.data.metrics import Metric, mean
from whet.data.model_info import ModelInfo, read_model
from whet.run.validation import evaluate_all, trained_tokens
from whet_distill.config import DistillDataConfig
from whet_distill.teaching import Teaching

if TYPE_CHECKING:
    from whet.data.batch import Batch
    from whet.data.offline import Encode
    from whet.interfaces.algorithm import Parts


class DistillData:
    """The loop: read, ask the teacher, learn, and now and then look at data that is not learned from."""

    def __init__(self, config: DistillDataConfig) -> None:
        self.config = config

    def run(self, parts: "Parts") -> None:
        """Run from the first step that is left to the last."""
        config, backend = self.config, parts.backend
        assert parts.data is not None  # what feeds on data gets it
        data = parts.data.prepare()
        validation = data.validation(config.batch_size)
        teach = Teaching(config, parts, read_model(parts.chat.folder))

        if validation and parts.steps.done == 0:
            parts.steps.log_start(validate(parts, validation, teach))
        for step in parts.steps:
            batch = data.batch(step.number, config.batch_size)
            step.log(backend.train(teach(batch), parts.loss))
            step.log({"epoch": mean(data.epoch(step.number, config.batch_size))})
            if validation and step.due(config.validate_every):
                step.log(validate(parts, validation, teach))
            if step.due(parts.config.evaluation.every):
                parts.refit(version=step.number)  # the generator plays the evaluation's episodes
            step.finish(batch)


def encoder(config: DistillDataConfig, model: ModelInfo) -> "Encode":
    """Return what turns a record into a sequence to train on."""
    return partial(encode, names=config.fields, train_on=config.train_on)


def validate(parts: "Parts", batches: "Iterable[Batch]", teach: Teaching) -> dict[str, Metric]:
    """Give `validation/loss` and what else the loss gives, as means over all trained tokens of all batches."""
    found = evaluate_all(parts.backend, map(teach, batches), parts.loss, trained_tokens)
    return {f"validation/{name}": metric for name, metric in found.items()}
