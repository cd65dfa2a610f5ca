"""The hooks of this plugin."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_hf.config import HfConfig


@hookimpl
def whet_generators() -> Iterable[Component]:
    """Offer the generator `hf`, which decodes with a `transformers` model."""
    return [Component("hf", HfConfig, "whet_hf.generator:HfGenerator", facts="whet_hf.facts:facts")]
