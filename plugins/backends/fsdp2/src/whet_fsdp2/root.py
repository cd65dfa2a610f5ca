"""The forward pass of a model: logprobs or values at the positions that are read, so logits never leave it.

`transformers` may have sharded the model with FSDP2, whose hooks gather weights when a module is called. So the pass
takes the place of the model's own `forward`, and the head's formula takes the place of the head's.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from whet_fsdp2.feed import Feed
from whet_fsdp2.narrowed import Narrowed, ReadRows, read_only_at
from whet_fsdp2.sharding import local, reshard, tensor_group
from whet_ops.head_outputs import divergences, head_outputs, wanted_divergences
from whet_ops.logprobs import MATRIX
from whet_ops.vocabulary import WHOLE, Vocabulary

Formula = Callable[[Tensor, Tensor, dict[str, Any]], dict[str, Tensor]]
"""(hidden states [M, H], the head's weight, the head's further arguments) -> outputs."""


class Root:
    """A Hugging Face causal model that is called with a `Feed` and the names of outputs."""

    probe = "logprobs"
    """An output that this model always has."""

    def __init__(self, model: Any, chunk: int) -> None:
        self.model = model
        self.chunk, self.rule = chunk, MATRIX
        self.narrowed: tuple[Narrowed | ReadRows, ...] = ()
        """Modules of the last layer that are computed only at the positions that are read."""
        self.teacher: tuple[Root, ...] = ()
        """The frozen model of the divergences."""
        self._head, self._group = model.get_output_embeddings(), tensor_group(model)
        embedding = model.get_input_embeddings()
        reshard(model)
        # FSDP2 gathers a tied weight for the embedding. The head's is a second copy, which does not follow the first
        # one if the ranks do not divide the vocabulary.
        self._owner = embedding if embedding.weight is self._head.weight else self._head
        self._head.forward = self._apply
        model.forward = self._forward

    def __call__(self, feed: Feed, outputs: Sequence[str]) -> dict[str, Tensor]:
        """Return the wanted outputs and always `logprobs`: [M] or [M, K] each. See `whet.interfaces.backend`."""
        found: dict[str, Tensor] = self.model(feed, tuple(outputs))
        return gathered(feed, found)

    def pass_through(self, feed: Feed) -> None:
        """Run the forward pass without the head's formula, for what its layers record."""
        self.model(feed, ("logits",))

    def _forward(self, feed: Feed, outputs: Sequence[str]) -> dict[str, Tensor]:
        other = None
        if wanted_divergences(outputs):
            import torch

            with torch.no_grad():
                other = {**self.teacher[0].model(feed, ("logits",)), "rule": self.teacher[0].rule}

        def formula(hidden: Tensor, weight: Tensor, terms: dict[str, Any]) -> dict[str, Tensor]:
            if "logits" in outputs:  # of a teacher: hidden states and head, as all logits at once need too much memory
                bias = terms["bias"]
                return {"hidden": hidden, "weight": weight, **({} if bias is None else {"bias": bias})}
            # FSDP2 casts float tensors among the arguments of `_head`; a temperature must not be rounded.
            of_head = {**terms, "temperature": feed.temperature, "chunk": self.chunk, "rule": self.rule}
            found = head_outputs(outputs, hidden, weight, feed.targets, feed.ids, of_head)
            return found if other is None else found | divergences(outputs, hidden, weight, other, of_head)

        found: dict[str, Tensor] = self._head(read_hidden(self, feed), formula)
        return owned(self.model, found)

    def _apply(self, hidden: Tensor, formula: Formula) -> dict[str, Tensor]:
        """Compute a formula on the head's weight. Takes the place of the head's forward pass."""
        weight, bias = self._owner.weight, getattr(self._head, "bias", None)
        rows = _rows_of(weight, self._group)
        bias = None if bias is None else local(bias)
        return formula(hidden, local(weight), {"bias": bias, "vocabulary": rows})


class ValueRoot:
    """A Hugging Face sequence classifier with one label. Its head is applied at every target position."""

    probe = "values"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.narrowed: tuple[Narrowed | ReadRows, ...] = ()
        """Modules of the last layer that are computed only at the positions that are read."""
        model.forward = self._forward

    def __call__(self, feed: Feed, outputs: Sequence[str]) -> dict[str, Tensor]:
        """Return `values` [M] float32."""
        return gathered(feed, self.model(feed))

    def pass_through(self, feed: Feed) -> None:
        """Run the forward pass, for what its layers record."""
        self.model(feed)

    def _forward(self, feed: Feed) -> dict[str, Tensor]:
        return owned(self.model, {"values": self.model.score(read_hidden(self, feed))[:, 0].float()})


AnyRoot = Root | ValueRoot


def read_hidden(root: AnyRoot, feed: Feed) -> Tensor:
    """Return the last hidden states at the positions that are read: [M, hidden size]."""
    read_only_at(root.narrowed, feed.rows, feed.arguments["input_ids"].numel())
    hidden = root.model.base_model(**feed.arguments).last_hidden_state
    rows: Tensor = hidden.reshape(-1, hidden.shape[-1]).index_select(0, feed.source)
    return rows


def owned(model: Any, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return outputs that are no views, if FSDP2 has hooks on them: a change in place would drop the hooks."""
    if not isinstance(model, FSDPModule):
        return found
    return {name: values.clone() if values._is_view() else values for name, values in found.items()}


def gathered(feed: Feed, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return outputs at all targets of a row that ranks share, in a row of one rank unchanged."""
    return found if feed.piece is None else {name: feed.piece.gather(values) for name, values in found.items()}


def _rows_of(weight: Tensor, group: Any) -> Vocabulary:
    """Return which rows of the head this rank holds."""
    if not isinstance(weight, DTensor):
        return WHOLE
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return Vocabulary(weight.shape[0], offset[0], group)
