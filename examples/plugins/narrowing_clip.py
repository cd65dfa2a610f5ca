"""A loss that knows the step: the clipped policy gradient, whose upper bound falls from step to step."""

import torch
from attrs import field, frozen, validators

import whet
from whet_ops.losses import clipped_policy_gradient


@frozen
class NarrowingClipConfig:
    """The clipped policy gradient: wide at first to explore, narrow at the end."""

    first: float = field(default=0.4, validator=validators.ge(0))
    """How far a ratio may rise above 1 in the first step."""
    last: float = field(default=0.2, validator=validators.ge(0))
    """How far in the last step. It falls evenly."""


def facts(config, model):
    columns = frozenset({"advantages", "sampler_logprobs"})
    return whet.LossFacts(outputs_needed=frozenset({"logprobs"}), columns_read=columns)


class NarrowingClip:
    columns, outputs, weights = ("advantages", "sampler_logprobs"), ("logprobs",), {"policy": 1.0}

    def __init__(self, config):
        self._config = config

    def counts(self, batch):
        return {"policy": batch["loss_mask"].sum()}

    def live(self, batch):
        return batch["advantages"] != 0

    def __call__(self, outputs, batch):
        done = (batch.info["step"] - 1) / max(batch.info["steps"] - 1, 1)
        high = self._config.first + done * (self._config.last - self._config.first)
        advantages = batch["advantages"].repeat_interleave(batch["lengths"])
        found = clipped_policy_gradient(outputs["logprobs"], batch["sampler_logprobs"], advantages, 0.2, high)
        mask = batch["loss_mask"]
        clipped = (found.clipped & mask).sum(), mask.sum()
        return whet.LossResult({"policy": torch.where(mask, found.loss, 0.0).sum()}, {"clipped": clipped})


@whet.hookimpl
def whet_losses():
    return [whet.Component("narrowing-clip", NarrowingClipConfig, ":NarrowingClip", ":facts")]
