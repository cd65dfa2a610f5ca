"""What whet-dpo offers: the algorithms `dpo` and `kto`, and the losses that fit them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from whet import hookimpl
from whet.component import Component, LossFacts, Problem, Selection
from whet.data.model_info import ModelInfo
from whet.plan.plan import facts_of
from whet_dpo import loss_config as sections
from whet_dpo import whole_config
from whet_dpo.config import DpoConfig, KtoConfig
from whet_ops.algorithms.config import terms_of

if TYPE_CHECKING:
    from whet.config.sections import Config

_REFERENCED, _FREE = "loss_config:referenced_facts", "loss_config:reference_free_facts"
_WHOLE = "whole_config:whole_facts"
_LOSSES: tuple[tuple[str, type, str, str], ...] = (
    ("dpo", sections.DpoLossConfig, "losses:Dpo", _REFERENCED),
    ("robust-dpo", sections.RobustDpoConfig, "losses:RobustDpo", _REFERENCED),
    ("ipo", sections.IpoConfig, "losses:Ipo", _REFERENCED),
    ("hinge", sections.HingeConfig, "losses:Hinge", _REFERENCED),
    ("exo-pair", sections.ExoPairConfig, "losses:ExoPair", _REFERENCED),
    ("discopop", sections.DiscopopConfig, "losses:Discopop", _REFERENCED),
    ("nca-pair", sections.NcaPairConfig, "losses:NcaPair", _REFERENCED),
    ("sppo-hard", sections.SppoHardConfig, "losses:SppoHard", _REFERENCED),
    ("apo-zero", sections.ApoZeroConfig, "losses:ApoZero", _REFERENCED),
    ("apo-down", sections.ApoDownConfig, "losses:ApoDown", _REFERENCED),
    ("bco-pair", whole_config.BcoPairConfig, "whole_losses:BcoPair", _WHOLE),
    ("aot", whole_config.AotConfig, "whole_losses:Aot", _WHOLE),
    ("aot-unpaired", whole_config.AotUnpairedConfig, "whole_losses:AotUnpaired", _WHOLE),
    ("simpo", sections.SimpoConfig, "losses:Simpo", _FREE),
    ("orpo", sections.OrpoConfig, "losses:Orpo", _FREE),
    ("cpo", sections.CpoConfig, "losses:Cpo", _FREE),
    ("sft", sections.SftLossConfig, "losses:Sft", _FREE),
    ("kto", sections.KtoLossConfig, "unpaired:Kto", "loss_config:kto_loss_facts"),
    ("bco", whole_config.BcoConfig, "unpaired:Bco", "whole_config:bco_facts"),
    (
        "weighted-sum",
        whole_config.WeightedSumConfig,
        "weighted_sum:WeightedSum",
        "whole_config:weighted_sum_facts",
    ),
)
"""Name, config, target and facts of each."""


@hookimpl
def whet_algorithms() -> Iterable[Component]:
    """Offer preference optimisation on pairs and on single responses."""
    yield Component("dpo", DpoConfig, "whet_dpo.dpo:Dpo", "whet_dpo.config:dpo_facts")
    yield Component("kto", KtoConfig, "whet_dpo.kto:Kto", "whet_dpo.config:kto_facts")


@hookimpl
def whet_losses() -> Iterable[Component]:
    """Offer the losses on pairs and on single responses, with a reference and without, and sums of them."""
    for name, config, target, facts in _LOSSES:
        yield Component(name, config, f"whet_dpo.{target}", f"whet_dpo.{facts}")


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Find keys without effect, and terms of a sum that do not go together."""
    loss = getattr(config.algorithm.config, "loss", None)
    if not isinstance(loss, Selection):
        return
    terms = list(terms_of(loss, "algorithm.loss"))
    for path, term in terms:
        yield from _of_keys(path, term.config)
    if isinstance(loss.config, whole_config.WeightedSumConfig):
        yield from _of_sum(config, terms)


def _of_keys(path: str, loss: Any) -> Iterable[Problem]:
    """Find keys of a loss that have no effect."""
    sft = getattr(loss, "sft", None)
    if isinstance(sft, sections.SftTerm) and sft.of == "conversation" and not sft.weight:
        yield Problem(f"{path}.sft.of", f"has no effect without a likelihood term; set {path}.sft.weight")
    alpha, usual = getattr(loss, "divergence_alpha", None), sections.DpoLossConfig().divergence_alpha
    if alpha not in (None, usual) and (divergence := loss.divergence) != "alpha":
        wanted = f"set {path}.divergence: alpha, or leave it out"
        yield Problem(f"{path}.divergence_alpha", f"has no effect on the divergence {divergence}; {wanted}")
    if isinstance(loss, sections.CpoConfig) and loss.label_smoothing and loss.loss_type != "sigmoid":
        words = f"has no effect on the loss_type {loss.loss_type}; set {path}.loss_type: sigmoid, or leave it out"
        yield Problem(f"{path}.label_smoothing", words)
    moved = getattr(loss, "shift_mean", None) not in (None, whole_config.BcoPairConfig().shift_mean)
    if moved and loss.shift == "none":
        yield Problem(f"{path}.shift_mean", f"has no effect without a shift; set {path}.shift, or leave it out")


def _of_sum(config: "Config", terms: list[tuple[str, Selection]]) -> Iterable[Problem]:
    """Find terms that read one column of the whole batch, and terms that would learn without the preference."""
    owner: dict[str, str] = {}
    for path, term in terms:
        for column in whole_config.columns_for(term.config):
            if column in owner:
                words = f"reads the column {column!r}, which holds what {owner[column]} compares with"
                yield Problem(path, f"{words}; one term of a sum can read it")
            owner.setdefault(column, path)
    kind = {DpoConfig: "chosen", KtoConfig: "desirable"}.get(type(config.algorithm.config))
    for path, term in terms:
        read = facts_of(term, ModelInfo(config.model.path, {}), LossFacts).columns_read
        if kind is not None and kind not in read:
            words = f"reads no {kind!r}, so it would learn all responses alike"
            yield Problem(path, f"{words}; for the likelihood of the chosen responses alone choose `sft`")
