"""A loss on whole sequences with two sides: TOPR (Le Roux et al. 2025, arXiv:2503.14286), tapered REINFORCE.

A good response is pushed up with weight 1, however unlikely it has become. A bad one is pushed down with the truncated
ratio of its probability now and when it was sampled, so that what the model no longer says is left alone.
"""

import torch
from attrs import field, frozen, validators

import whet
from whet_ops.losses import sequence_ratio


@frozen
class ToprConfig:
    """REINFORCE with a truncated importance weight, for bad responses only."""

    max_ratio: float = field(default=1.0, validator=validators.ge(0))
    """Largest weight of a bad response."""


def facts(config, model):
    columns = frozenset({"advantages", "sampler_logprobs"})
    return whet.LossFacts(outputs_needed=frozenset({"logprobs"}), columns_read=columns)


class Topr:
    columns, outputs, weights = ("advantages", "sampler_logprobs"), ("logprobs",), {"policy": 1.0}

    def __init__(self, config):
        self._config = config

    def counts(self, batch):
        return {"policy": batch["loss_mask"].sum()}

    def live(self, batch):
        return batch["advantages"] != 0

    def __call__(self, outputs, batch):
        logprobs, mask = outputs["logprobs"], batch["loss_mask"]
        advantages = batch["advantages"].repeat_interleave(batch["lengths"])
        ratio = sequence_ratio(logprobs.detach(), batch["sampler_logprobs"], mask, batch["lengths"], product=True)
        weight = torch.where(advantages > 0, 1.0, ratio.clamp(max=self._config.max_ratio))
        total = torch.where(mask, -weight * advantages * logprobs, 0.0).sum()
        bad = mask & (advantages < 0)
        return whet.LossResult({"policy": total}, {"weight/bad": (torch.where(bad, weight, 0.0).sum(), bad.sum())})


@whet.hookimpl
def whet_losses():
    return [whet.Component("topr", ToprConfig, ":Topr", ":facts")]
