"""Divergences between a student's and a teacher's next-token distributions, of which K tokens are known. On torch.

With p the student's probabilities and q the teacher's, of a set of K tokens at each place:

    forward  KL(q || p) = sum_k q_k (log q_k - log p_k)      the student covers all that the teacher does
    reverse  KL(p || q) = sum_k p_k (log p_k - log q_k)      the student keeps to what the teacher does
    Jensen-Shannon   b KL(q || m) + (1 - b) KL(p || m),  m = b q + (1 - b) p      always finite

`outside` decides about the rest of the vocabulary:

    renormalise  p and q are normalised over the K tokens, as if there were no others      NeMo RL's default
    zero         q is normalised over them and is e^-100 elsewhere, p is unchanged         NeMo RL's zero_outside_topk.
                 Reverse needs the student's entropy
    ignore       both are unchanged, and the sum is over the K tokens only; it may be negative
    rest         both are unchanged, and all other tokens count as one more token, of probability 1e-7 or more: the
                 float32 logprobs do not tell less. Never negative, and but for that never above the divergence over
                 the whole vocabulary (data processing inequality)
"""

from __future__ import annotations  # the site is built without torch

import math
from typing import Literal

import torch
from torch import Tensor

Outside = Literal["renormalise", "zero", "ignore", "rest"]

LOG_OF_NEARLY_NOTHING = -100.0
"""The teacher's logprob of tokens that are not among its likeliest, if `outside` is `zero`."""
_LEAST = -1.0e4
_LEAST_REST = 1e-7
"""Probability of all other tokens. TRL's bound: rounding errors of K float32 logprobs are as large."""


def topk_divergences(
    student: Tensor, teacher: Tensor, outside: Outside = "renormalise", entropy: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (forward, reverse), [M] float32 nats each, from logprobs of K tokens: student, teacher [M, K].

    Logprobs are over the whole vocabulary, and may be -inf. `entropy` [M] is the student's; only `zero` needs it.
    Differentiable in student and entropy.
    """
    log_p, log_q = _compared(student, teacher, outside)
    p, q = log_p.exp(), log_q.exp()
    forward, reverse = (q * (log_q - log_p)).sum(-1), (p * (log_p - log_q)).sum(-1)
    if outside == "zero" and entropy is not None:
        known = (p * log_p).sum(-1)
        reverse = reverse + (-entropy.float() - known) - LOG_OF_NEARLY_NOTHING * (1 - p.sum(-1))
    return forward, reverse


def topk_jensen_shannon(
    student: Tensor, teacher: Tensor, beta: float = 0.5, outside: Outside = "renormalise"
) -> Tensor:
    """Return the generalised Jensen-Shannon divergence, [M] float32 nats, from logprobs of K tokens, [M, K].

        m = beta q + (1 - beta) p;      beta KL(q || m) + (1 - beta) KL(p || m)

    GKD: Agarwal et al. 2024, section 2 (arXiv:2306.13649); TRL does the same. 0 < beta < 1. With `zero` the teacher
    never produces the tokens outside: the student's probability of them is multiplied by -(1 - beta) log(1 - beta).
    """
    if not 0 < beta < 1:
        raise ValueError(f"wanted beta between 0 and 1, found {beta}")
    log_p, log_q = _compared(student, teacher, outside)
    found = jensen_shannon(log_p, log_q, beta)
    if outside == "zero":
        found = found - (1 - log_p.exp().sum(-1)) * (1 - beta) * math.log1p(-beta)
    return found


def jensen_shannon(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Return the Jensen-Shannon sum over the last dimension, from finite logprobs [..., V] -> [...]."""
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    return (beta * log_q.exp() * (log_q - log_m) + (1 - beta) * log_p.exp() * (log_p - log_m)).sum(-1)


def _compared(student: Tensor, teacher: Tensor, outside: Outside) -> tuple[Tensor, Tensor]:
    """Return the logprobs of student and teacher that are compared: [M, K], or [M, K + 1] with the rest."""
    if student.shape != teacher.shape or student.ndim != 2:
        raise ValueError(f"wanted student and teacher [M, K], found {tuple(student.shape)} and {tuple(teacher.shape)}")
    log_p, log_q = student.float().clamp(min=_LEAST), teacher.float().clamp(min=_LEAST)
    if outside in ("renormalise", "zero"):
        log_q = torch.log_softmax(log_q, -1)
    if outside == "renormalise":
        log_p = torch.log_softmax(log_p, -1)
    elif outside == "rest":
        log_p, log_q = _with_rest(log_p), _with_rest(log_q)
    return log_p, log_q


def _with_rest(log_p: Tensor) -> Tensor:
    """Append the logprob of all other tokens together: [M, K + 1]."""
    known = torch.logsumexp(log_p.double(), -1, keepdim=True)
    rest = -torch.expm1(known.clamp(max=math.log1p(-_LEAST_REST)))  # no gradient where the bound holds
    return torch.cat([log_p, rest.log().float()], -1)
