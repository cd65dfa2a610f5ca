"""The loss term for leaving the reference policy, as its section states. Needs torch."""

from collections.abc import Mapping

from torch import Tensor

from whet.data.batch import Batch
from whet_ops.algorithms.config import KlLossSection
from whet_ops.kl import Importance, penalty_of_kl
from whet_ops.losses import sequence_ratio

WEIGHED: Mapping[str, Importance] = {
    "none": "none",
    "score": "score",
    "ratio": "ratio",
    "sampler": "ratio",
    "sequence": "ratio",
}
"""The formula for each `importance` of the section."""


def kl_loss(section: KlLossSection, logprobs: Tensor, old_logprobs: Tensor, batch: Batch, mask: Tensor) -> Tensor:
    """Return the penalty of each token, in nats. logprobs, old_logprobs, mask [N] -> [N].

    Reads `reference_logprobs`, and for the importance `sampler` the column `sampler_logprobs`. See `penalty_of_kl`.
    """
    whole = section.importance == "sequence"
    ratio = sequence_ratio(logprobs, old_logprobs, mask, batch["lengths"], limit=0.0) if whole else None
    sampled = batch["sampler_logprobs"] if section.importance == "sampler" else old_logprobs
    estimate: Tensor = penalty_of_kl(
        logprobs,
        batch["reference_logprobs"],
        sampled,
        section.estimator,
        importance=WEIGHED[section.importance],
        straight_through=section.straight_through,
        limit=section.clamp_log_ratio,
        clamp=section.clamp,
        ratio=ratio,
    )
    return estimate
