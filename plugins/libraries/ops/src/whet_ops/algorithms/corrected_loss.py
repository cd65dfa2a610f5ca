"""A loss that corrects for the gap between sampler and trainer within the training pass. Needs torch.

    forward pass -> trainer's logprobs -> weights and masks -> advantages -> the loss itself

If a batch gets one optimizer step, the training pass itself computes the logprobs that the correction compares, so no
other pass is needed; see `whet_ops.algorithms.policy_steps.place_correction`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from whet.data.batch import Batch
from whet.interfaces.loss import LossResult
from whet_ops.algorithms.config import CorrectionSection
from whet_ops.algorithms.policy_steps import correct_gap
from whet_ops.policy_loss import UNCORRECTED
from whet_ops.wrapped_loss import WrappedLoss


class Corrected(WrappedLoss):
    """Another loss, on advantages that are corrected with the logprobs of its own forward pass.

    The corrections are those of `policy_steps.correct_gap` that leave every token in the mean, so that counts are known
    before the pass, and that read each sequence by itself. They carry no gradient. The metrics are over the sequences
    that can move the loss before any correction, so they do not depend on micro-batches.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config["loss"])
        self._section = CorrectionSection(**config["correction"])
        if self._section.whole:
            raise ValueError("a correction that must know the whole batch must come before the training pass")
        self.columns = tuple(dict.fromkeys((*self.columns, "advantages", "sampler_logprobs")))
        self.outputs = tuple(dict.fromkeys((*self.outputs, "logprobs")))

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Correct the advantages and return the result of the inner loss."""
        logprobs = outputs["logprobs"]
        plain = batch.map(_plain).with_columns(old_logprobs=_plain(logprobs.float()))
        corrected, metrics = correct_gap(plain, self._section)
        advantages = torch.from_numpy(corrected["advantages"]).to(logprobs.device)
        columns = {"advantages": advantages, UNCORRECTED: batch["advantages"]}
        result = self.inner(outputs, batch.with_columns(**columns))
        return LossResult(result.terms, {**result.metrics, **metrics})


def _plain(column: Any) -> Any:
    return column.detach().cpu().numpy()
