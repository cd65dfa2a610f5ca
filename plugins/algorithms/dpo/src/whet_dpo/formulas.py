"""The losses of pairs and answers as formulas on torch, each with its paper. Needs torch; only workers import it.

Scores are [P]: of an answer, log pi(y|x) - log ref(y|x), or log pi(y|x) where there is no reference, summed over its
tokens or averaged. A margin is the chosen answer's score minus the rejected one's. All give a loss for each pair.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

MAX_MEAN_LOGPROB = -1e-6
"""Mean logprobs are clamped to this for odds, which are infinite for a certain answer."""


def dpo(margin: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m), with m the margin and e the label smoothing.

    Rafailov et al. 2023, equation 7 (arXiv:2305.18290); e above 0 is the conservative DPO of Mitchell 2023, "A note on
    DPO with noisy preferences".
    """
    return -(1 - label_smoothing) * logsigmoid(beta * margin) - label_smoothing * logsigmoid(-beta * margin)


def robust_dpo(margin: Tensor, beta: float, flip_probability: float) -> Tensor:
    """(-(1 - e) log sigmoid(beta m) + e log sigmoid(-beta m)) / (1 - 2e), with e the probability of a flip.

    Chowdhury et al. 2024, section 3 (arXiv:2403.00409): its mean over flips is DPO's loss on right labels. It has no
    lower bound.
    """
    right, wrong = -logsigmoid(beta * margin), -logsigmoid(-beta * margin)
    return ((1 - flip_probability) * right - flip_probability * wrong) / (1 - 2 * flip_probability)


def ipo(margin: Tensor, beta: float) -> Tensor:
    """(m - 1 / (2 beta))^2. Azar et al. 2023, equation 17 (arXiv:2310.12036), whose tau is beta."""
    return (margin - 1 / (2 * beta)) ** 2


def hinge(margin: Tensor, beta: float) -> Tensor:
    """max(0, 1 - beta m). Zhao et al. 2023, equation 1 (arXiv:2305.10425), on log-ratios as in Liu et al. 2023,
    section 3.2 (arXiv:2309.06657).
    """
    return torch.relu(1 - beta * margin)


def apo_zero(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """1 - sigmoid(beta c) + sigmoid(beta r), with c and r the scores. D'Oosterlinck et al. 2024, equation 7
    (arXiv:2408.06266), plus 1.
    """
    return torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected)


def apo_down(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """sigmoid(beta c) + 1 - sigmoid(beta (c - r)). D'Oosterlinck et al. 2024, equation 8 (arXiv:2408.06266), plus 1."""
    return torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected))


def simpo(margin: Tensor, beta: float, gamma: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log sigmoid(d) - e log sigmoid(-d), with d = beta m - gamma, and m of mean logprobs.

    Meng et al. 2024, equation 6 (arXiv:2405.14734), without label smoothing e; TRL's CPO trainer has this one.
    """
    ahead = beta * margin - gamma
    return -(1 - label_smoothing) * logsigmoid(ahead) - label_smoothing * logsigmoid(-ahead)


def odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(log odds(chosen) - log odds(rejected)), odds(y) = p / (1 - p) with log p the mean logprob.

    Hong et al. 2024, equations 4 and 7 (arXiv:2403.07691). Mean logprobs above -1e-6 count as that.
    """
    return -logsigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(mean_logprob: Tensor) -> Tensor:
    """log(p / (1 - p)) with log p the mean logprob."""
    bounded = mean_logprob.clamp(max=MAX_MEAN_LOGPROB)
    return bounded - torch.log(-torch.expm1(bounded))


def kto(score: Tensor, desirable: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """1 - sigmoid(beta (s - z)) where desirable, else 1 - sigmoid(beta (z - s)); score s, baseline z. All [B].

    Ethayarajh et al. 2024, equation 7 (arXiv:2402.01306), with the weights lambda left to the caller.
    """
    ahead = torch.where(desirable, score - baseline, baseline - score)
    return torch.sigmoid(-beta * ahead)
