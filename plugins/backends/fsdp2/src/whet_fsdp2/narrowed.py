"""Compute the last layer only at the positions that are read.

    layers 1 .. n-1     all positions: later positions attend to them
    layer n             keys and values at all positions; everything after the attention only at positions that are
                        read; if they are few in a packed row, the attention, too

No output is read at prompt tokens and at tokens of the environment; a reward model reads one position of a response. At
all other positions the output projection and the feed-forward network of the last layer need not be computed. Values
and gradients are the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

MOST = 0.8
"""If a larger share of the positions is read, all are computed, because selecting positions has a cost, too."""


READ = "whet_read"
"""The attribute of an attention module that holds its `ReadRows`."""


class ReadRows:
    """The positions at which the attention of a module is read."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self.rows: Tensor | None = None
        """Distinct positions in the flattened row that are read. None: all positions."""
        self._module = module
        if module is not None:
            setattr(module, READ, self)

    def undo(self) -> None:
        """Read all positions from now on."""
        self.rows = None
        if self._module is not None:
            delattr(self._module, READ)


NOWHERE = ReadRows()
"""Of a module that is read at all positions."""


class Narrowed:
    """The forward pass of a position-wise module, computed at `rows` [R] only; 0 elsewhere."""

    def __init__(self, module: nn.Module) -> None:
        self.rows: Tensor | None = None
        """Distinct positions in the flattened row that are read. None: all positions."""
        self._module, self._whole = module, module.forward
        module.forward = self

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the module's output at `rows`, 0 elsewhere. hidden [..., H] -> [..., H']."""
        whole: Callable[[Tensor], Tensor] = self._whole
        if self.rows is None:
            return whole(hidden)
        flat = hidden.reshape(-1, hidden.shape[-1])
        found = whole(flat.index_select(0, self.rows)[None])[0]
        room = found.new_zeros(len(flat), found.shape[-1])
        return room.index_copy(0, self.rows, found).view(*hidden.shape[:-1], -1)

    def undo(self) -> None:
        """Restore the module's own forward pass."""
        self.rows, self._module.forward = None, self._whole


def narrow(model: Any) -> tuple[Narrowed | ReadRows, ...]:
    """Restrict the last layer of a decoder. Returns () for a model whose modules do not have the usual names."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return ()
    network, reading = getattr(layers[-1], "mlp", None), getattr(layers[-1], "self_attn", None)
    project = getattr(reading, "o_proj", None)
    # Mixtures of experts return more than a tensor, or count the positions that they get, if beside the MLP as well.
    experts = hasattr(network, "experts") or getattr(layers[-1], "experts", None) is not None
    if not isinstance(project, nn.Linear) or not type(network).__name__.endswith("MLP") or experts:
        return ()
    assert isinstance(network, nn.Module)
    assert isinstance(reading, nn.Module)
    return Narrowed(project), Narrowed(network), ReadRows(reading)


def read_only_at(narrowed: Sequence[Narrowed | ReadRows], rows: Tensor | None, places: int) -> None:
    """Set the positions that are read in the next forward pass and in its backward pass."""
    chosen = None if rows is None or len(rows) > MOST * places else rows
    for one in narrowed:
        one.rows = chosen
