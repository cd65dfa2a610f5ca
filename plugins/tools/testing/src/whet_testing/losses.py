"""Small losses for testing backends. Torch is imported where they run."""

from collections.abc import Mapping
from typing import Any

from whet.data import metrics
from whet.data.batch import Batch
from whet.interfaces.loss import LossResult
from whet.ops.reductions import expand


class Likelihood:
    """The mean of -logprob over the tokens to learn. Travels as `Spec("whet_testing.losses:Likelihood")`."""

    columns: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("logprobs",)
    weights: Mapping[str, float] = {"likelihood": 1.0}

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Count the tokens to learn."""
        return {"likelihood": batch["loss_mask"].sum()}

    def live(self, batch: Batch) -> Any:
        """All sequences are live."""
        return batch["lengths"] >= 0

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Sum."""
        kept = (-outputs["logprobs"] * self.scale(batch)).where(batch["loss_mask"], outputs["logprobs"].new_zeros(()))
        return LossResult({"likelihood": kept.sum()}, {"learned": metrics.total(batch["loss_mask"].sum())})

    def scale(self, batch: Batch) -> Any:
        """Weigh each token. -> [N] or a number."""
        return 1.0


class Weighted(Likelihood):
    """The same, weighted by each sequence's advantage; sequences of advantage 0 are dead if `skip_dead`."""

    columns = ("advantages",)

    def live(self, batch: Batch) -> Any:
        """Say where the advantage is not 0."""
        return batch["advantages"] != 0 if self.config.get("skip_dead") else super().live(batch)

    def scale(self, batch: Batch) -> Any:
        """Weigh each token by its sequence's advantage."""
        return expand(batch["advantages"], batch["lengths"])


class Divergence(Likelihood):
    """The mean of `kl_forward` + 2 `kl_reverse`."""

    outputs = ("kl_forward", "kl_reverse")

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Sum."""
        return LossResult({"likelihood": (outputs["kl_forward"] + 2 * outputs["kl_reverse"]).sum()})


class AtTokens(Likelihood):
    """The mean of -`logprobs_at`, summed over the tokens of the column `topk_ids`."""

    outputs = ("logprobs_at",)

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Sum."""
        return LossResult({"likelihood": -outputs["logprobs_at"].sum()})


class Regression(Likelihood):
    """The mean squared distance of `values` from 1."""

    outputs = ("values",)

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Sum."""
        squares = (outputs["values"] - 1.0).square()
        return LossResult({"likelihood": squares.where(batch["loss_mask"], squares.new_zeros(())).sum()})
