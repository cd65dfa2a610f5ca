"""Small losses for testing backends. Importing this module does not import torch."""

from collections.abc import Mapping
from typing import Any

from whet.data import metrics
from whet.data.batch import Batch
from whet.interfaces.loss import LossResult
from whet_ops.reductions import expand


class Likelihood:
    """The mean of -logprob over the tokens to learn. Its spec is `Spec("whet_testing.losses:Likelihood")`."""

    columns: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("logprobs",)
    weights: Mapping[str, float] = {"likelihood": 1.0}

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Return the number of tokens to learn."""
        return {"likelihood": batch["loss_mask"].sum()}

    def live(self, batch: Batch) -> Any:
        """Return True for every sequence."""
        return batch["lengths"] >= 0

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Return the sum of -logprob x scale over the tokens to learn."""
        kept = (-outputs["logprobs"] * self.scale(batch)).where(batch["loss_mask"], outputs["logprobs"].new_zeros(()))
        return LossResult({"likelihood": kept.sum()}, {"learned": metrics.total(batch["loss_mask"].sum())})

    def scale(self, batch: Batch) -> Any:
        """Return the weight of each token. -> [N] or one number for all tokens."""
        return 1.0


class Weighted(Likelihood):
    """`Likelihood` with each token weighted by the advantage of its sequence.

    With `skip_dead` in the config, sequences whose advantage is 0 are not live.
    """

    columns = ("advantages",)

    def live(self, batch: Batch) -> Any:
        """Return where the advantage is not 0 if `skip_dead` is set, else True for every sequence."""
        return batch["advantages"] != 0 if self.config.get("skip_dead") else super().live(batch)

    def scale(self, batch: Batch) -> Any:
        """Return the advantage of each token's sequence. -> [N]."""
        return expand(batch["advantages"], batch["lengths"])


class Divergence(Likelihood):
    """The mean of `kl_forward` + 2 `kl_reverse`."""

    outputs = ("kl_forward", "kl_reverse")

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Return the sum over all tokens."""
        return LossResult({"likelihood": (outputs["kl_forward"] + 2 * outputs["kl_reverse"]).sum()})


class AtTokens(Likelihood):
    """The mean of -`logprobs_at`, summed over the token ids of the column `topk_ids`."""

    outputs = ("logprobs_at",)

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Return the sum over all tokens and ids."""
        return LossResult({"likelihood": -outputs["logprobs_at"].sum()})


class Regression(Likelihood):
    """The mean squared difference of `values` from 1."""

    outputs = ("values",)

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Return the sum of the squares over the tokens to learn."""
        squares = (outputs["values"] - 1.0).square()
        return LossResult({"likelihood": squares.where(batch["loss_mask"], squares.new_zeros(())).sum()})
