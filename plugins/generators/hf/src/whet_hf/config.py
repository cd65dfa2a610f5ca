"""The config section of the generator `hf`."""

from typing import Literal

from attrs import field, frozen

from whet.config.bounds import GIB, RETRIES, above, between


@frozen
class HfConfig:
    """Generates with a plain `transformers` model, on any device, without an inference engine."""

    max_batch: int = field(default=256, validator=between(1, RETRIES))
    """Most sequences that one rank decodes together. Requests that arrive during a batch wait for the next one."""
    cache_gib: float = field(default=4.0, validator=above(0, GIB))
    """Memory for keys and values on each rank, in GiB. If a batch needs more, fewer sequences are decoded together."""
    prefix_caching: bool = False
    """Keep keys and values of ended sequences, within `cache_gib`, for a next turn that begins with the same tokens.
    Logprobs then depend by rounding on what was generated before, so a resumed run is not equal to the bit. The fused
    decoder does this, and the model's own code does not; see `decoder`."""
    weights: Literal["own", "shared"] = "own"
    """`own`: a copy of the model, to which weight syncs bring new weights or an adapter. `shared`: those of the backend
    in the same process, in place, so that there is one copy and a weight sync copies an adapter at most. Backend and
    generator must have one rank each, on one device."""
    dtype: Literal["model", "float32", "bfloat16"] = "model"
    """Dtype of the weights and the forward pass. `model`: the value of `model.dtype`."""
    decoder: Literal["auto", "plain"] = "auto"
    """`auto`: the fused decoder, if it supports the model and a check at load finds equal logits. `plain`: always the
    model's own code."""
