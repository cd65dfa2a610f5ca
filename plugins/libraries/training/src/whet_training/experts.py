"""Options of mixtures of experts, the same in every backend. Imports no torch."""

from typing import Literal

from attrs import field, frozen

from whet.config.bounds import FACTOR, between

COLUMN = "routed_experts"
"""The batch column with the experts that the sampler chose."""


@frozen
class ExpertsConfig:
    """Options of mixtures of experts. A dense model is refused if one is set."""

    balance: float = field(default=0.0, validator=between(0, FACTOR))
    """Weight of the load-balancing loss in the objective: E * sum over experts of f * P, f the share of tokens that an
    expert gets (they add up to the number of chosen experts), P its mean probability (Fedus et al. 2021,
    arXiv:2101.03961, equations 4 to 6). 0.001 to 0.01 is usual."""
    balance_over: Literal["batch", "micro-batch"] = "batch"
    """Tokens over which f and P are taken. `batch`: all tokens of the optimizer step on all ranks (Qiu et al. 2025,
    arXiv:2501.11873), which does not depend on micro-batches, layout or ranks. It needs f before the first backward
    pass: with several micro-batches, a forward pass without gradient counts it, unless a replay has it. `micro-batch`:
    each micro-batch by itself, and the mean over micro-batches, as in `transformers` and Megatron."""
    balance_of: Literal["layer", "model"] = "layer"
    """`layer`: the mean of the losses of the layers. `model`: expert i of all layers counts as one expert, as in
    `load_balancing_loss_func` of `transformers`."""
    z_loss: float = field(default=0.0, validator=between(0, FACTOR))
    """Weight of the router z-loss: the mean over tokens and layers of logsumexp(router logits)^2 (Zoph et al. 2022,
    arXiv:2202.08906, equation 5). 0.001 is usual."""
    record: bool = False
    """Ask the generator for the experts that it chooses (column `routed_experts`), and report as
    `routing/disagreement` how often the trainer chooses others."""
    replay: bool = False
    """Compute with the experts that the generator chose, in training and in scores of the policy (routing replay:
    arXiv:2507.18071, section 5.3, and R3, arXiv:2510.11370). Their weights come from the trainer's own router. Where
    nothing is recorded, the router chooses. Implies `record`."""

    @property
    def columns(self) -> frozenset[str]:
        """Return the columns that a generator must record."""
        return frozenset({COLUMN} if self.record or self.replay else ())
