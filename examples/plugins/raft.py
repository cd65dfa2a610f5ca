"""RAFT, rejection sampling fine-tuning (Dong et al. 2023, arXiv:2304.06767): learn the best response to each prompt.

sample a group of responses -> keep the best, if it is good enough -> maximise its likelihood
"""

import numpy as np
from attrs import field, frozen

import whet
from whet.config.sections import selection


@frozen
class RaftConfig:
    """RAFT: fine-tune on the best of several responses."""

    prompts_per_step: int = field(default=16, validator=whet.between(1, 65536))
    """Number of prompts of one step."""
    group_size: int = field(default=8, validator=whet.between(2, 65536))
    """Number of responses to each prompt, of which the best one is learned."""
    at_least: float = field(default=0.0, validator=whet.between(-1e6, 1e6))
    """A best response with less reward is not learned."""
    loss: whet.Selection = selection("losses", "nll")
    """The loss that is minimised; `nll` is of `whet-sft`."""


def facts(config, model):
    return whet.AlgorithmFacts(
        inputs=frozenset({"rollouts"}), group_size=config.group_size, groups_per_step=config.prompts_per_step
    )


class Raft:
    def __init__(self, config):
        self._config = config

    def run(self, parts):
        for step in parts.steps:
            batch = parts.rollouts.take(self._config.prompts_per_step)
            learned = batch.where(best(batch) & (batch["reward"] >= self._config.at_least))
            step.log({"learned": whet.Metric("mean", learned.sequences, batch.sequences)})
            step.log(parts.backend.train(learned, parts.loss))
            parts.sync_weights(version=step.number)
            step.finish(batch)


def best(batch):
    """Return which sequence [B] is the first with the largest reward of its group."""
    order = np.lexsort((np.arange(batch.sequences), -batch["reward"], batch["group"]))
    _, first = np.unique(batch["group"][order], return_index=True)
    return np.isin(np.arange(batch.sequences), order[first])


@whet.hookimpl
def whet_algorithms():
    return [whet.Component("raft", RaftConfig, ":Raft", ":facts")]
