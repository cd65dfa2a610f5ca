"""Divergences between a student's and a teacher's next-token distributions, of which K tokens are known. On torch.

With p the student's probabilities and q the teacher's, of a set of K tokens at each place:

    forward  KL(q || p) = sum_k q_k (log q_k - log p_k)      covers what the teacher may say
    reverse  KL(p || q) = sum_k p_k (log p_k - log q_k)      keeps to what the teacher would say

`outside` says what becomes of the rest of the vocabulary:

    renormalise  p and q are normalised over the K tokens: the rest is as if it were not there      NeMo RL's default
    zero         q is normalised over them and stands for e^-100 elsewhere, p is as it is            NeMo RL's
                 zero_outside_topk. Reverse needs the student's entropy
    ignore       both are as they are, and the sum runs over the K tokens alone; it may be negative
    rest         both are as they are, and all other tokens count as one more. Never negative, and
                 never above the divergence over the whole vocabulary (data processing inequality)
"""

from __future__ import annotations  # the site is built without torch

from typing import Literal

import torch
from torch import Tensor

Outside = Literal["renormalise", "zero", "ignore", "rest"]

LOG_OF_NEARLY_NOTHING = -100.0
"""What the teacher gives tokens that are not among its likeliest, where `outside` is `zero`."""
_LEAST = -1.0e4
_LEAST_REST = 1e-12


def topk_divergences(
    student: Tensor, teacher: Tensor, outside: Outside = "renormalise", entropy: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Give (forward, reverse), [M] float32 nats each, from logprobs of K tokens: student, teacher [M, K].

    Logprobs are of the whole vocabulary, and may be -inf. `entropy` [M] is the student's; only `zero` needs it.
    Differentiable in student and entropy.
    """
    if student.shape != teacher.shape or student.ndim != 2:
        raise ValueError(f"wanted student and teacher [M, K], found {tuple(student.shape)} and {tuple(teacher.shape)}")
    log_p, log_q = student.float().clamp(min=_LEAST), teacher.float().clamp(min=_LEAST)
    if outside in ("renormalise", "zero"):
        log_q = torch.log_softmax(log_q, -1)
    if outside == "renormalise":
        log_p = torch.log_softmax(log_p, -1)
    elif outside == "rest":
        log_p, log_q = _with_rest(log_p), _with_rest(log_q)
    p, q = log_p.exp(), log_q.exp()
    forward, reverse = (q * (log_q - log_p)).sum(-1), (p * (log_p - log_q)).sum(-1)
    if outside == "zero" and entropy is not None:
        known = (p * log_p).sum(-1)
        reverse = reverse + (-entropy.float() - known) - LOG_OF_NEARLY_NOTHING * (1 - p.sum(-1))
    return forward, reverse


def _with_rest(log_p: Tensor) -> Tensor:
    """Append the logprob of all other tokens together: [M, K + 1]."""
    rest = (1 - log_p.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_REST)
    return torch.cat([log_p, rest.log()], -1)
