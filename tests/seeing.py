"""A single-file plugin: a loss that reads what only the facts of a loss ask for, and reports what it saw."""

import torch
from attrs import frozen

from whet import hookimpl
from whet.component import Component, LossFacts
from whet.data.metrics import mean
from whet.interfaces.loss import LossResult
from whet_ops.reductions import of_tokens

COLUMNS = ("advantages", "old_logprobs")


@frozen
class SeeingConfig:
    """The policy gradient with a ratio, whose weight falls from step to step."""


def facts(config, model):
    return LossFacts(outputs_needed=frozenset({"logprobs"}), columns_read=frozenset(COLUMNS), token_advantages=True)


class Seeing:
    columns = COLUMNS
    outputs = ("logprobs",)
    weights = {"policy": 1.0}

    def __init__(self, config):
        pass

    def counts(self, batch):
        return {"policy": batch["loss_mask"].sum()}

    def live(self, batch):
        return batch["lengths"] > 0

    def __call__(self, outputs, batch):
        mask, left = batch["loss_mask"], 1 / batch.info["step"]
        change = torch.where(mask, outputs["logprobs"] - batch["old_logprobs"], 0.0)
        total = torch.where(mask, -of_tokens(batch, "advantages") * change.exp(), 0.0).sum()
        metrics = {
            "seen/step": mean(batch.info["step"]),
            "seen/steps": mean(batch.info["steps"]),
            "seen/change": mean(change.detach().abs().sum(), mask.sum()),
        }
        return LossResult({"policy": left * total}, metrics)


@hookimpl
def whet_losses():
    return [Component("seeing", SeeingConfig, ":Seeing", ":facts")]
