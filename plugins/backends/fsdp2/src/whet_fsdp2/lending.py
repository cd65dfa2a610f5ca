"""Lend the policy's weights to a generator of the same process, which computes with them in place.

    the model's parameters and buffers      one memory for trainer and generator
    A and B of an adapter                   the generator copies them in each weight sync

What the trainer does to the modules (packed attention, the head's formula, checkpointing, the last layer at few
positions) stays with its own modules: a generator has modules of its own around these tensors.
"""

from collections.abc import Callable
from typing import Any

from whet_fsdp2.lora import Adapters
from whet_weights import lent


def lend(model: Any, adapters: Adapters | None, wake: Callable[[], None]) -> lent.Lent:
    """Offer the weights of a model that is whole on this rank. `wake`: see `whet_weights.lent.Lent`."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    held = lent.Tensors(named) if adapters is None else lent.Tensors(named, adapters.set_of, adapters.scaling)
    made = lent.Lent(lent.TRANSFORMERS, held, wake)
    lent.offer(made)
    return made
