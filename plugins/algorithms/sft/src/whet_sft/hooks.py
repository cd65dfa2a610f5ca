"""What whet-sft offers: the algorithm `sft` and the loss `nll`."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_sft.config import NllConfig, SftConfig


@hookimpl
def whet_algorithms() -> Iterable[Component]:
    """Offer supervised fine-tuning."""
    return [Component("sft", SftConfig, "whet_sft.sft:Sft", "whet_sft.config:sft_facts")]


@hookimpl
def whet_losses() -> Iterable[Component]:
    """Offer the negative log-likelihood."""
    return [Component("nll", NllConfig, "whet_sft.losses:Nll", "whet_sft.config:nll_facts")]
