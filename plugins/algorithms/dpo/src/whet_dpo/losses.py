"""The losses on pairs, a class for each formula. Needs torch; only workers import it."""

from torch import Tensor

from whet_dpo import config as sections
from whet_dpo import formulas
from whet_dpo.pairwise import PairLoss


class Dpo(PairLoss[sections.DpoLossConfig]):
    """See `whet_dpo.formulas.dpo`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Give the loss of each pair."""
        return formulas.dpo(chosen - rejected, self.config.beta, self.config.label_smoothing)


class RobustDpo(PairLoss[sections.RobustDpoConfig]):
    """See `whet_dpo.formulas.robust_dpo`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Give the loss of each pair."""
        return formulas.robust_dpo(chosen - rejected, self.config.beta, self.config.flip_probability)


class Ipo(PairLoss[sections.IpoConfig]):
    """See `whet_dpo.formulas.ipo`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Give the loss of each pair."""
        return formulas.ipo(chosen - rejected, self.config.beta)


class Hinge(PairLoss[sections.HingeConfig]):
    """See `whet_dpo.formulas.hinge`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Give the loss of each pair."""
        return formulas.hinge(chosen - rejected, self.config.beta)


class ApoZero(PairLoss[sections.ApoZeroConfig]):
    """See `whet_dpo.formulas.apo_zero`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Give the loss of each pair."""
        return formulas.apo_zero(chosen, rejected, self.config.beta)


class ApoDown(PairLoss[sections.ApoDownConfig]):
    """See `whet_dpo.formulas.apo_down`."""

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Give the loss of each pair."""
        return formulas.apo_down(chosen, rejected, self.config.beta)


class Simpo(PairLoss[sections.SimpoConfig]):
    """See `whet_dpo.formulas.simpo`. Scores are mean logprobs."""

    referenced = False

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Give the loss of each pair."""
        config = self.config
        return formulas.simpo(chosen - rejected, config.beta, config.gamma, config.label_smoothing)


class Orpo(PairLoss[sections.OrpoConfig]):
    """See `whet_dpo.formulas.odds_ratio`. Scores are mean logprobs; the likelihood has weight 1 by default."""

    referenced = False

    def preference(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Give beta times the loss of each pair."""
        return self.config.beta * formulas.odds_ratio(chosen, rejected)
