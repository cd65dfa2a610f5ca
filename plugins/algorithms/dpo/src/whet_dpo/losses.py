"""The losses on pairs, a class for each formula. Needs torch; only workers import it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from whet.data.batch import Batch
from whet.interfaces.loss import LossResult
from whet_dpo import formulas
from whet_dpo import loss_config as sections
from whet_dpo.pairwise import PairLoss, Scoring, likelihood, likelihood_count, live_pairs


class Dpo(PairLoss[sections.DpoLossConfig]):
    """See `whet_dpo.formulas.dpo`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair."""
        return formulas.dpo(chosen - rejected, self.config.beta, self.config.label_smoothing)


class RobustDpo(PairLoss[sections.RobustDpoConfig]):
    """See `whet_dpo.formulas.robust_dpo`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair."""
        return formulas.robust_dpo(chosen - rejected, self.config.beta, self.config.flip_probability)


class Ipo(PairLoss[sections.IpoConfig]):
    """See `whet_dpo.formulas.ipo`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair."""
        return formulas.ipo(chosen - rejected, self.config.beta)


class Hinge(PairLoss[sections.HingeConfig]):
    """See `whet_dpo.formulas.hinge`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair."""
        return formulas.hinge(chosen - rejected, self.config.beta)


class ApoZero(PairLoss[sections.ApoZeroConfig]):
    """See `whet_dpo.formulas.apo_zero`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair."""
        return formulas.apo_zero(chosen, rejected, self.config.beta)


class ApoDown(PairLoss[sections.ApoDownConfig]):
    """See `whet_dpo.formulas.apo_down`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair."""
        return formulas.apo_down(chosen, rejected, self.config.beta)


class Simpo(PairLoss[sections.SimpoConfig]):
    """See `whet_dpo.formulas.simpo`. Scores are mean logprobs."""

    referenced = False

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair."""
        config = self.config
        return formulas.simpo(chosen - rejected, config.beta, config.gamma, config.label_smoothing)


class Orpo(PairLoss[sections.OrpoConfig]):
    """See `whet_dpo.formulas.odds_ratio`. Scores are mean logprobs; the likelihood has weight 1 by default."""

    referenced = False

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return beta times the loss of each pair."""
        return self.config.beta * formulas.odds_ratio(chosen, rejected)


class ExoPair(PairLoss[sections.ExoPairConfig]):
    """See `whet_dpo.formulas.exo_pair`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair."""
        return formulas.exo_pair(chosen - rejected, self.config.beta, self.config.label_smoothing)


class Discopop(PairLoss[sections.DiscopopConfig]):
    """See `whet_dpo.formulas.discopop`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair."""
        return formulas.discopop(chosen - rejected, self.config.beta, self.config.temperature)


class NcaPair(PairLoss[sections.NcaPairConfig]):
    """See `whet_dpo.formulas.nca_pair`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair."""
        return formulas.nca_pair(chosen, rejected, self.config.beta)


class SppoHard(PairLoss[sections.SppoHardConfig]):
    """See `whet_dpo.formulas.sppo_hard`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair."""
        return formulas.sppo_hard(chosen, rejected, self.config.beta)


class Cpo(PairLoss[sections.CpoConfig]):
    """See `whet_dpo.formulas`: `cpo`, `hinge` or `ipo`. Scores are logprobs; the likelihood has weight 1 by default."""

    referenced = False

    @property
    def scoring(self) -> Scoring:
        """Return how the responses are scored. By default, `ipo` alone averages."""
        average = self.config.average_logprobs
        return Scoring(self.referenced, self.config.loss_type == "ipo" if average is None else average)

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair."""
        margin, beta = chosen - rejected, self.config.beta
        if self.config.loss_type == "sigmoid":
            return formulas.cpo(margin, beta, self.config.label_smoothing)
        return formulas.hinge(margin, beta) if self.config.loss_type == "hinge" else formulas.ipo(margin, beta)


class Sft:
    """The negative log-likelihood of the chosen responses, and nothing else."""

    outputs: tuple[str, ...] = ("logprobs",)
    weights: Mapping[str, float] = {"sft": 1.0}

    def __init__(self, config: sections.SftLossConfig) -> None:
        self.config = config
        self.columns: tuple[str, ...] = sections.pair_columns(config.sft)

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        """Return the number of tokens or responses that the mean is over."""
        return {"sft": likelihood_count(batch, self.config.sft)}

    def live(self, batch: Batch) -> Any:
        """Return which sequences belong to a pair with trained tokens."""
        return live_pairs(batch)

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        """Return the sum over the chosen responses of this micro-batch."""
        total, nll = likelihood(outputs["logprobs"], batch, self.config.sft)
        return LossResult({"sft": total}, {"nll": nll})
