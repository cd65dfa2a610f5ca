"""Preference optimisation on pairs, after direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290).

Left out on purpose: a reference that follows the policy during the run. What varies is chosen in the config: the loss,
and whether the reference's logprobs are computed beforehand, with each batch, or not at all.
"""

from typing import TYPE_CHECKING

from whet.data.model_info import read_model
from whet_dpo.config import DpoConfig, source
from whet_dpo.loss_config import REFERENCE
from whet_dpo.reference import precomputed
from whet_dpo.whole import WholeBatch
from whet_ops.algorithms.offline_loop import offline_loop, read_data

if TYPE_CHECKING:
    from whet.data.batch import Batch
    from whet.interfaces.algorithm import OfflineParts


class Dpo:
    """The loop: read pairs, score them by the reference, train, and validate when due."""

    def __init__(self, config: DpoConfig) -> None:
        self.config = config

    def run(self, parts: "OfflineParts") -> None:
        """Run from the first step that is left to the last."""
        config, backend = self.config, parts.backend
        model = read_model(parts.chat.folder)
        data = read_data(parts)
        reference = source(config, model)
        if reference == "precomputed":
            data = precomputed(parts, data, config.batch_size)
        whole = WholeBatch(parts, config.loss)

        def prepare(batch: "Batch", step: int) -> "Batch":
            if reference == "on-the-fly":
                scores = backend.score(batch, ("logprobs",), "reference")["logprobs"]
                batch = batch.with_columns(**{REFERENCE: scores})
            return whole(batch, step)

        offline_loop(parts, data, config, prepare=prepare)
