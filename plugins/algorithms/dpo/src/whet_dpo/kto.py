"""Preference optimisation on single responses: Kahneman-Tversky optimisation.

Ethayarajh et al. 2024 (arXiv:2402.01306). Left out on purpose: a reference that follows the policy during the run.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from whet.data.metrics import Metric, mean
from whet.data.model_info import read_model
from whet_dpo.baseline import kl_baseline
from whet_dpo.config import KtoConfig, reads_baseline, source
from whet_dpo.loss_config import BASELINE, KINDS, REFERENCE
from whet_dpo.reference import precomputed
from whet_dpo.whole import WholeBatch
from whet_ops.algorithms.offline_loop import offline_loop, read_data

if TYPE_CHECKING:
    from whet.data.batch import Batch
    from whet.interfaces.algorithm import OfflineParts


class Kto:
    """The loop: read responses, estimate the baseline, train, and validate when due.

    The baseline is a number of the whole batch, so it is computed here and not in the loss, which sees a part.
    """

    def __init__(self, config: KtoConfig) -> None:
        self.config = config

    def run(self, parts: "OfflineParts") -> None:
        """Run from the first step that is left to the last."""
        config, backend = self.config, parts.backend
        data = read_data(parts)
        model = read_model(parts.chat.folder)
        reference, compared = source(config, model), reads_baseline(config, model)
        if reference == "precomputed":
            data = precomputed(parts, data, config.batch_size)
        whole = WholeBatch(parts, config.loss)

        def prepare(batch: "Batch", step: int) -> "Batch":
            zeros = np.zeros(batch.sequences, np.float32)
            batch = batch.with_columns(**{BASELINE: kl_baseline(backend, batch) if compared else zeros})
            if reference == "on-the-fly":
                scores = backend.score(batch, ("logprobs",), "reference")["logprobs"]
                batch = batch.with_columns(**{REFERENCE: scores})
            return whole(batch, step)

        by_kinds = getattr(config.loss.config, "average", "") == "kinds"
        offline_loop(parts, data, config, prepare=prepare, derive=with_margins, over_all=of_kinds if by_kinds else dict)


def of_kinds(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics of several batches with the loss of `average: kinds` over all of them.

    A mean over batches would count half of the loss of a batch that has one kind of response.
    """
    if not metrics.keys() >= set(KINDS):
        return dict(metrics)
    return {**metrics, "loss": mean(sum(metrics[name].number() for name in KINDS) / len(KINDS))}


def with_margins(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics with the difference of the mean rewards, where there are both."""
    chosen, rejected = (metrics.get(f"rewards/{name}") for name in ("chosen", "rejected"))
    if chosen is None or rejected is None or not (float(chosen.count) and float(rejected.count)):
        return dict(metrics)
    return {**metrics, "rewards/margins": mean(chosen.number() - rejected.number())}
