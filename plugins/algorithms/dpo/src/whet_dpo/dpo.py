"""Preference optimisation on pairs, after direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290).

Left out on purpose: a reference that follows the policy during the run. What varies is chosen in the config: the loss,
and whether the reference's logprobs are computed beforehand, with each batch, or not at all.
"""

from typing import TYPE_CHECKING

from whet.data.metrics import mean
from whet.data.model_info import read_model
from whet_dpo.config import DpoConfig, source
from whet_dpo.loss_config import REFERENCE
from whet_dpo.reference import precomputed
from whet_dpo.validation import validate
from whet_dpo.whole import WholeBatch

if TYPE_CHECKING:
    from whet.data.batch import Batch
    from whet.interfaces.algorithm import Parts


class Dpo:
    """The loop: read pairs, compare with the reference, learn, and now and then look at pairs not learned from."""

    def __init__(self, config: DpoConfig) -> None:
        self.config = config

    def run(self, parts: "Parts") -> None:
        """Run from the first step that is left to the last."""
        config, backend = self.config, parts.backend
        assert parts.data is not None  # what feeds on data gets it
        model = read_model(parts.chat.folder)
        data = parts.data.prepare()
        reference = source(config, model)
        if reference == "precomputed":
            data = precomputed(parts, data, config.batch_size)
        validation = data.validation(config.batch_size)

        whole = WholeBatch(parts, config.loss)

        def prepare(batch: "Batch", step: int = 0) -> "Batch":
            if reference == "on-the-fly":
                scores = backend.score(batch, ("logprobs",), "reference")["logprobs"]
                batch = batch.with_columns(**{REFERENCE: scores})
            return whole(batch, step)

        if validation and parts.steps.done == 0:
            parts.steps.log_start(validate(backend, validation, parts.loss, prepare))
        for step in parts.steps:
            batch = prepare(data.batch(step.number, config.batch_size), step.number)
            step.log(backend.train(batch, parts.loss))
            step.log({"epoch": mean(data.epoch(step.number, config.batch_size))})
            if validation and step.due(config.validate_every):
                step.log(validate(backend, validation, parts.loss, prepare))
            if step.due(parts.config.evaluation.every):
                parts.refit(version=step.number)  # the generator plays the evaluation's episodes
            step.finish(batch)
