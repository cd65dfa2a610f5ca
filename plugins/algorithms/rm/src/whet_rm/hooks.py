"""What whet-rm offers: the algorithm `rm` and the loss `bradley-terry`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_rm.config import BradleyTerryConfig, RmConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_algorithms() -> Iterable[Component]:
    """Offer reward modelling."""
    return [Component("rm", RmConfig, "whet_rm.rm:Rm", "whet_rm.config:rm_facts")]


@hookimpl
def whet_losses() -> Iterable[Component]:
    """Offer the likelihood of preferences."""
    target, facts = "whet_rm.losses:BradleyTerry", "whet_rm.config:bradley_terry_facts"
    return [Component("bradley-terry", BradleyTerryConfig, target, facts)]


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Find what a model without words cannot do."""
    if isinstance(config.algorithm.config, RmConfig) and config.generator is not None:
        yield Problem("generator", "is given, but a reward model writes no responses; remove it")
