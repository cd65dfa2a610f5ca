"""The sections of losses that read numbers of the whole batch, and of sums of losses. Imports no torch.

A loss sees a part of a batch. What it needs of the whole comes as a column, which the algorithm computes before the
step from the policy's scores: see `whet_dpo.whole`.
"""

from typing import Any, Literal

from attrs import field, frozen

from whet.component import LossFacts, Selection
from whet.config.bounds import FACTOR, between
from whet.config.renamed import renamed
from whet.config.sections import selection
from whet.data.model_info import ModelInfo
from whet.plan.plan import facts_of
from whet_dpo.loss_config import REFERENCE, SHARE, KtoLossConfig, Preference, pair_columns, pair_facts
from whet_ops.algorithms.config import terms_of

SHIFT = "score_shift"
"""Column [B], one number for the whole batch: the score that BCO's classifier calls even."""
MARGIN_SHIFT = "margin_shift"
"""Column [B] of a pair's number: what turns its margin into that of sorted log-ratios, for `aot`."""
MATCHED = "matched_score"
"""Column [B] of the score of the response that sorting puts opposite, for `aot-unpaired`."""
Shift = Literal["batch", "running", "none"]
Mean = Literal["kinds", "responses"]


@frozen
class BcoPairConfig(Preference):
    """BCO on pairs: classify each response as chosen or rejected by its reward, compared with a shift."""

    shift: Shift = "batch"
    """What rewards are compared with. `batch`: their mean over the whole batch of the step. `running`: their mean over
    all batches up to this one. `none`: 0, which saves a forward pass."""
    shift_mean: Mean = field(default="kinds", metadata=renamed(answers="responses"))
    """`kinds`: the mean of two means, over chosen and over rejected responses, as in the paper. `responses`: the mean
    over all responses, as in TRL."""


@frozen
class BcoConfig(KtoLossConfig):
    """BCO on single responses: classify each as desirable or not by its reward, compared with a shift."""

    shift: Shift = "batch"
    """What rewards are compared with. `batch`: their mean over the whole batch of the step. `running`: their mean over
    all batches up to this one. `none`: 0, which saves a forward pass."""
    shift_mean: Mean = field(default="kinds", metadata=renamed(answers="responses"))
    """`kinds`: the mean of two means, over desirable and over other responses, as in the paper. `responses`: the mean
    over all responses, as in TRL."""


@frozen
class AotConfig(Preference):
    """AOT on pairs: the policy's log-ratios of chosen to rejected, sorted over the batch, are to exceed the
    reference's, sorted as well.
    """

    label_smoothing: float = field(default=0.0, validator=SHARE)
    """Share of the labels that are taken to be wrong."""


@frozen
class AotUnpairedConfig(Preference):
    """AOT of two sets: the scores of the chosen responses, sorted over the batch, are to exceed the scores of the
    rejected ones, sorted as well.
    """

    label_smoothing: float = field(default=0.0, validator=SHARE)
    """Share of the labels that are taken to be wrong."""


@frozen
class SumTerm:
    """A term of a sum: a loss by `use:`, with its own keys beside it."""

    component: Selection = selection("losses", inline=True)
    """The loss."""
    weight: float = field(default=1.0, validator=between(0, FACTOR))
    """Weight of the loss."""
    name: str = ""
    """The name of its metrics; by default the name of the loss."""

    @property
    def label(self) -> str:
        """Return the name under which its metrics stand."""
        return self.name or self.component.name


def _apart(instance: object, attribute: Any, terms: list[SumTerm]) -> None:
    labels = [term.label for term in terms]
    if not labels:
        raise ValueError("has no terms; list at least one, e.g. `terms: [{use: dpo, weight: 0.8}, {use: sft}]`")
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"has {labels.count(label)} terms named {label!r}; set `name` of all but one")


def _mpo() -> list[SumTerm]:
    """Return the terms of mixed preference optimisation, with the paper's weights."""
    from whet_dpo.hooks import whet_losses  # the hooks import this module

    offers = {component.name: component for component in whet_losses()}

    def term(weight: float, name: str, **keys: Any) -> SumTerm:
        chosen = Selection("losses", offers[name], offers[name].config(**keys), "whet-dpo")
        return SumTerm(component=chosen, weight=weight)

    return [term(0.8, "dpo"), term(0.2, "bco-pair", shift="running"), term(1.0, "sft")]


@frozen
class WeightedSumConfig:
    """A weighted sum of losses; by default that of MPO: `dpo`, `bco-pair` and `sft`."""

    terms: list[SumTerm] = field(factory=_mpo, validator=_apart)
    """Losses by `use:`, each with its `weight`, and with a `name` where two are the same loss."""


def whole_columns(loss: Selection | None) -> frozenset[str]:
    """Return the columns of the whole batch that a loss of this package reads."""
    return frozenset(name for _, term in terms_of(loss) for name in columns_for(term.config))


def columns_for(config: object) -> tuple[str, ...]:
    """Return the columns of the whole batch that a loss with this section reads."""
    if isinstance(config, BcoPairConfig | BcoConfig):
        return () if config.shift == "none" else (SHIFT,)
    if isinstance(config, AotConfig):
        return (MARGIN_SHIFT,)
    return (MATCHED,) if isinstance(config, AotUnpairedConfig) else ()


def whole_facts(config: BcoPairConfig | AotConfig | AotUnpairedConfig, model: ModelInfo) -> LossFacts:
    """Return what planning needs to know of a loss on pairs that reads numbers of the whole batch."""
    return pair_facts(*pair_columns(config.sft), REFERENCE, *columns_for(config))


def bco_facts(config: BcoConfig, model: ModelInfo) -> LossFacts:
    """Return what planning needs to know of BCO on single responses."""
    return pair_facts("desirable", REFERENCE, *columns_for(config))


def weighted_sum_facts(config: WeightedSumConfig, model: ModelInfo) -> LossFacts:
    """Return the needs of all terms together."""
    found = [facts_of(term.component, model, LossFacts) for term in config.terms]
    return LossFacts(
        outputs_needed=frozenset().union(*(facts.outputs_needed for facts in found)),
        columns_read=frozenset().union(*(facts.columns_read for facts in found)),
        role=found[0].role,
        token_advantages=all(facts.token_advantages for facts in found if "advantages" in facts.columns_read),
    )
