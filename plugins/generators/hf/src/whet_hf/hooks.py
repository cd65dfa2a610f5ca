"""The hooks of this plugin."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component, Problem
from whet.config.sections import Config
from whet_hf.checks import checked
from whet_hf.config import HfConfig


@hookimpl
def whet_generators() -> Iterable[Component]:
    """Offer the generator `hf`, which decodes with a `transformers` model."""
    return [Component("hf", HfConfig, "whet_hf.generator:HfGenerator", facts="whet_hf.facts:facts")]


@hookimpl
def whet_check_config(config: Config) -> Iterable[Problem]:
    """Yield what shared weights do not allow beside a generator `hf`."""
    yield from checked(config)
