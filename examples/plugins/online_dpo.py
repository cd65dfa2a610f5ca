"""Online DPO (Guo et al. 2024, arXiv:2402.04792): the best and the worst response of a group are a preference pair.

sample a group of responses -> pair the best with the worst -> the loss of DPO, against the frozen start
"""

import numpy as np
from attrs import field, frozen

import whet
from whet.config.sections import selection


@frozen
class OnlineDpoConfig:
    """Preference optimisation on pairs that the model has just sampled, chosen by their reward."""

    prompts_per_step: int = field(default=16, validator=whet.between(1, 65536))
    """Number of prompts of one step. A prompt whose rewards are all equal makes no pair."""
    group_size: int = field(default=4, validator=whet.between(2, 65536))
    """Number of responses to each prompt."""
    loss: whet.Selection = selection("losses", "dpo")
    """The loss that is minimised: any of `whet-dpo` that reads pairs."""


def facts(config, model):
    return whet.AlgorithmFacts(
        inputs=frozenset({"rollouts"}),
        group_size=config.group_size,
        groups_per_step=config.prompts_per_step,
        weights_needed=frozenset({"reference"}),
        columns_written=frozenset({"chosen", "reference_logprobs"}),
        columns_essential=frozenset({"chosen"}),
    )


class OnlineDpo:
    def __init__(self, config):
        self._config = config

    def run(self, parts):
        for step in parts.steps:
            batch = parts.rollouts.take(self._config.prompts_per_step)
            pairs = paired(batch)
            scores = parts.backend.score(pairs, ("logprobs",), weights="reference")
            pairs = pairs.with_columns(reference_logprobs=scores["logprobs"])
            step.log({"pairs": whet.Metric("sum", pairs.sequences / 2)})
            step.log(parts.backend.train(pairs, parts.loss))
            parts.sync_weights(version=step.number)
            step.finish(batch)


def paired(batch):
    """Return the best and the worst sequence of each group, as units of two. Groups of equal rewards are left out."""
    order = np.lexsort((batch["reward"], batch["group"]))
    _, first, sizes = np.unique(batch["group"][order], return_index=True, return_counts=True)
    worst, best = order[first], order[first + sizes - 1]
    unequal = batch["reward"][best] > batch["reward"][worst]
    positions = np.stack([best[unequal], worst[unequal]], axis=1).ravel()
    pairs = np.arange(len(positions))
    return batch.take(positions).with_columns(unit=pairs // 2, chosen=pairs % 2 == 0)


@whet.hookimpl
def whet_algorithms():
    return [whet.Component("online-dpo", OnlineDpoConfig, ":OnlineDpo", ":facts")]
