"""The losses of scores as formulas on torch, each with its paper. Needs torch; only workers import it.

Scores are [P], one for each response of a pair; all give a number for each pair.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, label_smoothing: float = 0.0
) -> Tensor:
    """-(1 - e) log sigmoid(d) - e log sigmoid(-d), with d = chosen - rejected - margin and e the label smoothing.

    Ouyang et al. 2022, equation 1 (arXiv:2203.02155), a batch holding any pairs; with a margin Touvron et al. 2023,
    equation 2 (arXiv:2307.09288); e above 0: Wang et al. 2024 (arXiv:2401.06080).
    """
    ahead = chosen - rejected - margin
    return -(1 - label_smoothing) * logsigmoid(ahead) - label_smoothing * logsigmoid(-ahead)


def centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    """(chosen + rejected)^2, which differences of scores leave free. Eisenstein et al. 2023 (arXiv:2312.09244)."""
    return (chosen + rejected) ** 2
