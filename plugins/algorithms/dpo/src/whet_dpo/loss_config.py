"""The sections of the losses, and what planning needs to know of them. Imports no torch.

    Preference       losses with a reference: beta, average_logprobs, ld_alpha, sft, metrics
      _Divergent     those of them on a difference of scores: divergence

Losses that read a number of the whole batch are in `whet_dpo.whole_config`.
"""

from typing import Literal

from attrs import Factory, field, frozen, validators

from whet.component import LossFacts
from whet.config.bounds import FACTOR, above, below, between
from whet.config.renamed import renamed
from whet.data.model_info import ModelInfo

REFERENCE = "reference_logprobs"
RESPONSE = "response_mask"
"""Column [N] of the tokens of a response, where the prompt before it is learned as well."""
BASELINE = "kl_baseline"
"""Column [B] of the number that KTO compares scores with."""
KINDS = ("loss/desirable", "loss/undesirable")
"""Metrics of the losses with `average: kinds`: the mean over the desirable responses, and over the others."""
POSITIVE = above(0, FACTOR)
SHARE = below(0, 0.5)
"""The bounds of a share of labels that are wrong."""


@frozen
class SftTerm:
    """The negative log-likelihood of the chosen responses, as a second term of a loss."""

    weight: float = field(default=0.0, validator=between(0, FACTOR))
    """Its weight; 0: there is no such term."""
    average: Literal["token", "sequence", "none"] = "token"
    """`token`: the mean over all chosen tokens of the batch. `sequence`: the mean over responses of the mean over
    tokens. `none`: the mean over responses of the sum over tokens."""
    of: Literal["response", "conversation"] = field(default="response", metadata=renamed(answer="response"))
    """Whose tokens: those of the `response`, or of the whole `conversation`, its prompt included, as TRL's ORPO."""


@frozen
class PairMetrics:
    """How rewards and logprobs are reported. None of it changes what is learned."""

    ties: Literal["half", "wrong", "right"] = "half"
    """How a pair with equal rewards counts in `rewards/accuracies`; in TRL and NeMo RL as `wrong`."""
    rewards: Literal["compared", "summed"] = "compared"
    """`compared`: the score that the loss compares. `summed`: the log-ratio, summed over tokens, also where the loss
    takes means or compares a function of it, as in TRL's DPO."""
    scaled: bool = True
    """Multiply rewards by `beta`; not so in NeMo RL."""
    logps: Literal["sum", "mean"] = "sum"
    """Sum a response's logprobs in `logps/*`, or average them, as TRL does in SimPO and ORPO."""


@frozen
class Preference:
    """What the losses against a reference have in common."""

    beta: float = field(default=0.1, validator=POSITIVE)
    """How dear it is to move away from the reference: scales the log-ratio of policy and reference."""
    average_logprobs: bool = False
    """Divide a response's log-ratio by its tokens, so that long responses weigh no more than short ones."""
    ld_alpha: float = field(default=1.0, validator=between(0, 1))
    """Weight of the tokens by which a response is longer than the other of its pair (LD-DPO); 1: that of all tokens,
    0: they are left out."""
    sft: SftTerm = Factory(SftTerm)
    """The likelihood of the chosen responses as a second term."""
    metrics: PairMetrics = Factory(PairMetrics)
    """How rewards and logprobs are reported."""


@frozen
class _Divergent(Preference):
    """What the losses on differences of scores have in common: any f-divergence can hold the policy."""

    divergence: Literal["reverse-kl", "forward-kl", "jensen-shannon", "alpha"] = "reverse-kl"
    """Which divergence from the reference is held down. The score of a response is a function of its log-ratio:
    `reverse-kl`: the log-ratio itself, as in DPO."""
    divergence_alpha: float = field(default=0.5, validator=between(0, 1))
    """For the divergence `alpha`: at 0 it is `reverse-kl`, at 1 `forward-kl`. TRL's coefficient is 1 minus this."""


@frozen
class DpoLossConfig(_Divergent):
    """DPO: the log-loss of telling the chosen response from the rejected one by their log-ratios to a reference."""

    label_smoothing: float = field(default=0.0, validator=SHARE)
    """Share of the pairs that are taken to be the wrong way round (conservative DPO)."""


@frozen
class RobustDpoConfig(_Divergent):
    """DPO made unbiased against labels that are wrong with a known probability."""

    flip_probability: float = field(default=0.1, validator=SHARE)
    """Probability that a pair is the wrong way round."""


@frozen
class IpoConfig(_Divergent):
    """IPO: a squared loss that wants the log-ratios to differ by a fixed margin, so that sure pairs cannot run away."""

    average_logprobs: bool = True
    """Compare log-ratios per token, as the paper's authors did; `false`: of whole responses, as the paper's formula
    reads."""


@frozen
class HingeConfig(_Divergent):
    """The hinge loss of SLiC on log-ratios: a pair that is right by a margin teaches nothing."""


@frozen
class ExoPairConfig(_Divergent):
    """EXO on pairs: the reverse KL divergence of the policy's preference from the smoothed label."""

    label_smoothing: float = field(default=1e-3, validator=[validators.gt(0), validators.lt(0.5)])
    """Probability of the rejected response in the label (the paper's epsilon); above 0, for the divergence from a label
    without doubt is infinite."""


@frozen
class DiscopopConfig(_Divergent):
    """DiscoPOP: the log-loss for pairs that are wrong, blended into the exponential loss for pairs that are right."""

    temperature: float = field(default=0.05, validator=above(0, 1))
    """Width of the blend around a margin of 0 (the paper's tau). Below 0.1 a pair at a margin of 0 is at first pushed
    in the wrong direction. Above 1 the loss of a wrong pair would grow exponentially."""


@frozen
class NcaPairConfig(Preference):
    """NCA on pairs: classify the chosen response against noise, and hold down the likelihood of both."""


@frozen
class SppoHardConfig(Preference):
    """SPPO with labels without doubt: squared distances of both log-ratios from 1 / (2 beta) and its negative."""


@frozen
class ApoZeroConfig(Preference):
    """APO-zero: make chosen responses likelier and rejected ones less likely. Responses should be better
    than the policy's.
    """


@frozen
class ApoDownConfig(Preference):
    """APO-down: make both less likely, the rejected one more so. Responses should be worse than the policy's."""


@frozen
class SimpoConfig:
    """SimPO: compare mean logprobs per token, without a reference, by a margin."""

    beta: float = field(default=2.0, validator=POSITIVE)
    """Scales the mean logprob of a response."""
    gamma: float = field(default=1.0, validator=between(0, FACTOR))
    """Margin by which the chosen response is to be ahead, after scaling."""
    label_smoothing: float = field(default=0.0, validator=SHARE)
    """Share of the pairs that are taken to be the wrong way round."""
    sft: SftTerm = Factory(SftTerm)
    """The likelihood of the chosen responses as a second term."""
    metrics: PairMetrics = Factory(PairMetrics)
    """How rewards and logprobs are reported."""


@frozen
class OrpoConfig:
    """ORPO: the likelihood of the chosen responses, and the odds of chosen against rejected, without a reference."""

    beta: float = field(default=0.1, validator=POSITIVE)
    """Weight of the odds ratio (the paper's lambda)."""
    sft: SftTerm = Factory(lambda: SftTerm(weight=1.0))
    """The likelihood of the chosen responses."""
    metrics: PairMetrics = Factory(PairMetrics)
    """How rewards and logprobs are reported."""


@frozen
class CpoConfig:
    """CPO: DPO without a reference, and the likelihood of the chosen responses."""

    beta: float = field(default=0.1, validator=POSITIVE)
    """Scales the logprob of a response. With the `loss_type` `ipo`, logprobs are not scaled, and 1 / (2 beta) is the
    difference that the loss aims at."""
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """The loss of a pair, as in TRL's CPO trainer. `sigmoid`: the log-loss, as in the paper. `hinge`: the hinge loss of
    SLiC. `ipo`: the squared loss of IPO."""
    average_logprobs: bool | None = None
    """Divide a response's logprob by its tokens. Null: only for the `loss_type` `ipo`, as in TRL."""
    label_smoothing: float = field(default=0.0, validator=SHARE)
    """For `sigmoid`: share of the pairs that are taken to be the wrong way round."""
    sft: SftTerm = Factory(lambda: SftTerm(weight=1.0))
    """The likelihood of the chosen responses."""
    metrics: PairMetrics = Factory(PairMetrics)
    """How rewards and logprobs are reported."""


@frozen
class SftLossConfig:
    """The negative log-likelihood of the chosen responses of pairs, mostly as a term of a `weighted-sum`."""

    average: Literal["token", "sequence", "none"] = "token"
    """What the mean is over; see `sft.average` of the loss `dpo`."""
    of: Literal["response", "conversation"] = field(default="response", metadata=renamed(answer="response"))
    """Whose tokens: those of the `response`, or of the whole `conversation`, its prompt included."""

    @property
    def sft(self) -> SftTerm:
        """Return the term that the loss consists of."""
        return SftTerm(1.0, self.average, self.of)


@frozen
class KtoLossConfig:
    """KTO: desirable responses are to be worth more than a baseline, the others less."""

    beta: float = field(default=0.1, validator=POSITIVE)
    """How dear it is to move away from the reference: scales the log-ratio of policy and reference."""
    desirable_weight: float = field(default=1.0, validator=between(0, FACTOR))
    """Weight of desirable responses."""
    undesirable_weight: float = field(default=1.0, validator=between(0, FACTOR))
    """Weight of the others. With unequal numbers, weights times numbers should be about the same."""
    average: Literal["responses", "kinds"] = field(default="responses", metadata=renamed(answers="responses"))
    """`responses`: the mean over all responses, as in the paper. `kinds`: the mean of two means, over the desirable and
    over the other responses of the batch, so that neither kind pulls more, whatever their numbers."""
    metrics: PairMetrics = Factory(PairMetrics)
    """How rewards and logprobs are reported."""


def pair_columns(sft: SftTerm) -> tuple[str, ...]:
    """Return the columns that every loss on pairs reads."""
    return ("chosen", RESPONSE) if sft.weight and sft.of == "conversation" else ("chosen",)


def pair_facts(*columns: str) -> LossFacts:
    """Return the facts of a loss on logprobs that reads these columns."""
    return LossFacts(outputs_needed=frozenset({"logprobs"}), columns_read=frozenset(columns))


def referenced_facts(config: Preference, model: ModelInfo) -> LossFacts:
    """Return what planning needs to know of a loss on pairs that has a reference."""
    return pair_facts(*pair_columns(config.sft), REFERENCE)


def reference_free_facts(config: SimpoConfig | OrpoConfig | CpoConfig | SftLossConfig, model: ModelInfo) -> LossFacts:
    """Return what planning needs to know of a loss on pairs that has none."""
    return pair_facts(*pair_columns(config.sft))


def kto_loss_facts(config: KtoLossConfig, model: ModelInfo) -> LossFacts:
    """Return what planning needs to know of the loss."""
    return pair_facts("desirable", BASELINE, REFERENCE)
