"""The last layer, computed only where something is read of it.

    layers 1 .. n-1     all places: later ones attend to them
    layer n             keys and values of all places; what follows the attention only where an output is wanted

Nothing is read of prompts, of what an environment said, and with a reward model of all places of an answer but one, so
the output projection and the feed-forward network of the last layer need not be computed there. Values and gradients
are the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

MOST = 0.8
"""Share of the places above which all are computed, for picking them out costs something, too."""


class Narrowed:
    """The forward pass of one module that treats each place by itself: `rows` [R] alone, 0 elsewhere."""

    def __init__(self, module: nn.Module) -> None:
        self.rows: Tensor | None = None
        """Places in the flattened row that are read, each once; None: all of them."""
        self._module, self._whole = module, module.forward
        module.forward = self

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute the module at `rows`. hidden [..., H] -> [..., H']."""
        whole: Callable[[Tensor], Tensor] = self._whole
        if self.rows is None:
            return whole(hidden)
        flat = hidden.reshape(-1, hidden.shape[-1])
        found = whole(flat.index_select(0, self.rows)[None])[0]
        room = found.new_zeros(len(flat), found.shape[-1])
        return room.index_copy(0, self.rows, found).view(*hidden.shape[:-1], -1)

    def undo(self) -> None:
        """Let the module compute all places again."""
        self.rows, self._module.forward = None, self._whole


def narrow(model: Any) -> tuple[Narrowed, ...]:
    """Narrow the last layer of a decoder whose parts are called as in most of them; else nothing."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return ()
    network, project = getattr(layers[-1], "mlp", None), getattr(getattr(layers[-1], "self_attn", None), "o_proj", None)
    # Mixtures of experts give more than a tensor, or count the places that they see.
    if not isinstance(project, nn.Linear) or not type(network).__name__.endswith("MLP"):
        return ()
    assert isinstance(network, nn.Module)
    return Narrowed(project), Narrowed(network)


def read_only_at(narrowed: Sequence[Narrowed], rows: Tensor | None, places: int) -> None:
    """Say for the next pass, and the backward pass of it, which of its places are read."""
    chosen = None if rows is None or len(rows) > MOST * places else rows
    for one in narrowed:
        one.rows = chosen
