"""The losses of pairs and responses as formulas on torch, each with its paper. Needs torch; only workers import it.

Scores are [P]: of a response, log pi(y|x) - log ref(y|x), or log pi(y|x) where there is no reference, summed over its
tokens or averaged. A margin is the chosen response's score minus the rejected one's. All return a loss for each pair.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

MAX_MEAN_LOGPROB = -1e-6
"""Mean logprobs are clamped to this for odds, which are infinite for a certain response."""
MAX_EXPONENT = 40.0
"""Exponents of scores are clamped to this, so that squares and gradients of scores stay finite in float32."""
Divergence = Literal["reverse-kl", "forward-kl", "jensen-shannon", "alpha"]


def divergence_score(log_ratio: Tensor, divergence: Divergence, alpha: float) -> Tensor:
    """Return f'(u) of u = pi(y|x) / ref(y|x), but for a constant that cancels in margins. log_ratio [B] = log u -> [B].

        reverse-kl      log u             jensen-shannon   log(2u / (1 + u))
        forward-kl      1 - 1 / u         alpha            (1 - u^-alpha) / alpha;   0: reverse-kl, 1: forward-kl

    Wang et al. 2023, section 4 and table 1 (arXiv:2309.16240). Exponents above 40 count as 40 and have no gradient.
    """
    if divergence == "jensen-shannon":
        return math.log(2) + logsigmoid(log_ratio)
    power = {"reverse-kl": 0.0, "forward-kl": 1.0, "alpha": alpha}[divergence]
    if not power:
        return log_ratio
    return -torch.expm1((-power * log_ratio).clamp(max=MAX_EXPONENT)) / power


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
    """max(0, 1 - beta m). Zhao et al. 2023, equation 1 (arXiv:2305.10425), on logprobs; on log-ratios as in Liu et al.
    2023, section 3.2 (arXiv:2309.06657).
    """
    return torch.relu(1 - beta * margin)


def exo_pair(margin: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """(q log(q / (1 - e)) + (1 - q) log((1 - q) / e)), with q = sigmoid(beta m) and e the label smoothing.

    Ji et al. 2024, equation 16 (arXiv:2402.00856): KL(policy's preference || smoothed label), for two responses.
    """
    right, wrong = logsigmoid(beta * margin), logsigmoid(-beta * margin)
    of_right = right.exp() * (right - math.log1p(-label_smoothing))
    return of_right + wrong.exp() * (wrong - math.log(label_smoothing))


def nca_pair(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta c) - log sigmoid(-beta c) / 2 - log sigmoid(-beta r) / 2, with c and r the scores.

    Chen et al. 2024 (arXiv:2402.05369): noise contrastive alignment of two responses of which one is preferred.
    """
    held_down = logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected)
    return -logsigmoid(beta * chosen) - held_down / 2


def bco(score: Tensor, desirable: Tensor, shift: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta (s - z)) where desirable, else -log sigmoid(beta (z - s)); score s, shift z. All [B].

    Jung et al. 2024 (arXiv:2404.04656): the reward is beta s, and the paper's delta is beta z.
    """
    ahead = torch.where(desirable, score - shift, shift - score)
    return -logsigmoid(beta * ahead)


def sppo_hard(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2, with c and r the scores.

    Wu et al. 2024, equation 4.7 (arXiv:2405.00675), whose eta is 1 / beta. The probability that a response wins is 1
    for the chosen one and 0 for the other.
    """
    return (chosen - 1 / (2 * beta)) ** 2 + (rejected + 1 / (2 * beta)) ** 2


def discopop(margin: Tensor, beta: float, temperature: float) -> Tensor:
    """-(1 - w) log sigmoid(beta m) + w exp(-beta m), with w = sigmoid(beta m / t) and t the temperature.

    Lu et al. 2024, equation 5 (arXiv:2406.08414): the log-ratio modulated loss.
    """
    reward = beta * margin
    logistic = -torch.sigmoid(-reward / temperature) * logsigmoid(reward)
    # One exponent rather than a product: of a pair that is far behind it would be 0 times infinity.
    return logistic + torch.exp(logsigmoid(reward / temperature) - reward)


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


def cpo(margin: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m), with m of logprobs without a reference.

    Xu et al. 2024, equation 3 (arXiv:2401.08417), without label smoothing e; TRL's CPO trainer has this one.
    """
    return dpo(margin, beta, label_smoothing)


def kto(score: Tensor, desirable: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """1 - sigmoid(beta (s - z)) where desirable, else 1 - sigmoid(beta (z - s)); score s, baseline z. All [B].

    Ethayarajh et al. 2024, equation 7 (arXiv:2402.01306), with the weights lambda left to the caller.
    """
    ahead = torch.where(desirable, score - baseline, baseline - score)
    return torch.sigmoid(-beta * ahead)
