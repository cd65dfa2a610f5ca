"""What whet-dpo offers: the algorithms `dpo` and `kto`, and the losses that fit them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_dpo import config as sections

if TYPE_CHECKING:
    from whet.config.sections import Config

_LOSSES: tuple[tuple[str, type, str, str], ...] = (
    ("dpo", sections.DpoLossConfig, "losses:Dpo", "referenced"),
    ("robust-dpo", sections.RobustDpoConfig, "losses:RobustDpo", "referenced"),
    ("ipo", sections.IpoConfig, "losses:Ipo", "referenced"),
    ("hinge", sections.HingeConfig, "losses:Hinge", "referenced"),
    ("apo-zero", sections.ApoZeroConfig, "losses:ApoZero", "referenced"),
    ("apo-down", sections.ApoDownConfig, "losses:ApoDown", "referenced"),
    ("simpo", sections.SimpoConfig, "losses:Simpo", "reference_free"),
    ("orpo", sections.OrpoConfig, "losses:Orpo", "reference_free"),
    ("kto", sections.KtoLossConfig, "unpaired:Kto", "kto_loss"),
)
"""Name, config, target and facts of each."""


@hookimpl
def whet_algorithms() -> Iterable[Component]:
    """Offer preference optimisation on pairs and on single answers."""
    yield Component("dpo", sections.DpoConfig, "whet_dpo.dpo:Dpo", "whet_dpo.config:dpo_facts")
    yield Component("kto", sections.KtoConfig, "whet_dpo.kto:Kto", "whet_dpo.config:kto_facts")


@hookimpl
def whet_losses() -> Iterable[Component]:
    """Offer the losses on pairs, with a reference and without, and KTO's."""
    for name, config, target, facts in _LOSSES:
        yield Component(name, config, f"whet_dpo.{target}", f"whet_dpo.config:{facts}_facts")


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Find a second term that is described and not wanted."""
    loss = getattr(getattr(config.algorithm.config, "loss", None), "config", None)
    sft = getattr(loss, "sft", None)
    if isinstance(sft, sections.SftTerm) and sft.of == "conversation" and not sft.weight:
        yield Problem("algorithm.loss.sft.of", "has no effect without a likelihood term; set algorithm.loss.sft.weight")
