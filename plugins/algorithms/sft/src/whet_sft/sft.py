"""Supervised fine-tuning: minimise the negative log-likelihood of demonstrations.

Left out on purpose: packing and length bins (the backend does these) and any schedule (the optimizer's).
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from whet.data.metrics import Metric, mean
from whet_data.demonstrations import encode
from whet_ops.algorithms.offline_loop import offline_loop, read_data, trained_tokens
from whet_sft.config import NllConfig, SftConfig

if TYPE_CHECKING:
    from whet.data.model_info import ModelInfo
    from whet.interfaces.algorithm import OfflineParts
    from whet.interfaces.data import Encode


class Sft:
    """The loop: read a batch, train, and validate when due."""

    def __init__(self, config: SftConfig) -> None:
        self.config = config

    def run(self, parts: "OfflineParts") -> None:
        """Run from the first step that is left to the last."""
        loss = self.config.loss.config
        weighted = isinstance(loss, NllConfig) and loss.weighting != "none"
        # `perplexity` of the validation data is the exponential of `nll`
        offline_loop(
            parts, read_data(parts), self.config, weight=trained_tokens, derive=with_perplexity,
            over_all=without_weights if weighted else dict, redundant=("nll",),
        )  # fmt: skip


def encoder(config: SftConfig, model: "ModelInfo") -> "Encode":
    """Return what turns a record into a sequence to train on."""
    return partial(encode, names=config.fields, train_on=config.train_on, plain=config.plain)


def without_weights(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics with the mean negative log-likelihood as the loss.

    The loss weighted by probability also grows where a token becomes likelier, up to a probability of 1 / e. So it
    does not tell a better model from a worse one.
    """
    return {**metrics, "loss": metrics["nll"]}


def with_perplexity(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics with `perplexity`, exp(mean negative log-likelihood), where the loss has that mean."""
    if "nll" not in metrics:
        return dict(metrics)
    return {**metrics, "perplexity": mean(math.exp(min(metrics["nll"].number(), 700.0)))}
