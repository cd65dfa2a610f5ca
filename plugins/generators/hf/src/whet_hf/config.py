"""The config section of the generator `hf`."""

from typing import Literal

from attrs import field, frozen

from whet.config.bounds import GIB, RETRIES, above, between


@frozen
class HfConfig:
    """Decodes with a plain `transformers` model, on any device, without an engine."""

    max_batch: int = field(default=256, validator=between(1, RETRIES))
    """Sequences decoded together, for each rank. Requests that come while a batch runs wait for the next."""
    cache_gib: float = field(default=4.0, validator=above(0, GIB))
    """Memory for keys and values, for each rank. Fewer sequences are decoded together where they would need more."""
    dtype: Literal["model", "float32", "bfloat16"] = "model"
    """Of the weights and the forward pass; `model`: as `model.dtype` says."""
    decoder: Literal["auto", "plain"] = "auto"
    """`auto`: the fused decoder for models that it knows, if a check at load finds it equal to the model. `plain`:
    always the model's own code."""
