"""The names and shapes that a model's tensors have in its folder, where they differ from those in memory.

`transformers` holds all experts of a layer as one tensor, and a folder holds one tensor for each expert and projection:

    in memory   model.layers.0.mlp.experts.gate_up_proj  [E, 2 I, H]
    stored      model.layers.0.mlp.experts.0.gate_proj.weight  [I, H], ...0.up_proj.weight, ...1.gate_proj.weight, ...

A weight sync uses stored names, because every engine reads them. A stored tensor is a view of the tensor in memory, so
both directions need no second copy:

    send        StoredNames(model).stored(weights)         yields views of each full tensor, one tensor at a time
    receive     StoredNames(model).pieces(name)[i].write(parameter, tensor)

What `transformers` does to a tensor when it saves a model is found once, by letting it do the same to positions.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class Piece:
    """A stored tensor as a part of a tensor in memory."""

    name: str
    """Name in the model folder."""
    shape: tuple[int, ...]
    """Shape in the model folder."""
    stride: tuple[int, ...] | None
    """Strides of the view, in elements. None: the elements are not evenly spaced, and `where` lists them."""
    offset: int
    """The first element of the view."""
    where: Tensor | None = None
    """Positions in the flattened tensor in memory, in the order of the stored tensor."""

    def read(self, tensor: Tensor) -> Tensor:
        """Return the stored tensor: a view of a contiguous tensor in memory, or a copy if there is no such view."""
        if self.stride is None:
            assert self.where is not None
            return tensor.reshape(-1)[self.where.to(tensor.device)].view(self.shape)
        flat = tensor.contiguous()
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Copy a stored tensor into its place in a contiguous tensor in memory."""
        if self.stride is None:
            assert self.where is not None
            flat = value.to(tensor).reshape(-1)
            tensor.view(-1).index_copy_(0, self.where.to(tensor.device), flat)
        else:
            tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset).copy_(value)


class StoredNames:
    """The stored pieces of each tensor of a `transformers` model."""

    def __init__(self, model: Any) -> None:
        self._pieces: dict[str, tuple[Piece, ...]] = {}
        """By name in memory, for tensors whose stored name or shape differs."""
        kinds: dict[Any, list[Piece]] = {}
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
        stored = {name: _stored(model, name, torch.empty(shape, device="meta")) for name, shape in shapes.items()}
        several = _made_of_several(stored)
        for name, shape in shapes.items():
            found = {new: tuple(tensor.shape) for new, tensor in stored[name].items()}
            size = sum(tensor.numel() for tensor in stored[name].values())
            # A stored tensor that `transformers` makes of several is handed over under its names in memory.
            if found == {name: shape} or size != torch.Size(shape).numel() or several & found.keys():
                continue
            if list(found.values()) == [shape]:
                (new,) = found
                self._pieces[name] = (_whole(new, shape),)
                continue
            kind = (_without_numbers(name), shape, tuple((_without_numbers(new), s) for new, s in found.items()))
            if kind not in kinds:
                kinds[kind] = _located(model, name, shape)
            self._pieces[name] = tuple(
                Piece(new, piece.shape, piece.stride, piece.offset, piece.where)
                for new, piece in zip(found, kinds[kind], strict=True)
            )

    def __bool__(self) -> bool:
        """Return whether any tensor's stored name or shape differs."""
        return bool(self._pieces)

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """Return the stored pieces of a tensor, by its name in memory. Empty: it is stored as it is."""
        return self._pieces.get(name, ())

    def stored(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a model under their stored names, as views. A tensor that is stored as it is passes."""
        for name, tensor in tensors:
            pieces = self._pieces.get(name)
            if pieces is None:
                yield name, tensor
            else:
                whole = tensor.contiguous()
                yield from ((piece.name, piece.read(whole)) for piece in pieces)


def _stored(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    try:
        found: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    except (ValueError, RuntimeError, KeyError, AttributeError):  # a conversion that needs other tensors as well
        return {name: tensor}
    return found


def _made_of_several(stored: dict[str, dict[str, Tensor]]) -> set[str]:
    """Return the stored names to which more than one tensor in memory contributes."""
    seen: set[str] = set()
    twice: set[str] = set()
    for found in stored.values():
        twice |= seen & found.keys()
        seen |= found.keys()
    return twice


def _whole(name: str, shape: tuple[int, ...]) -> Piece:
    return Piece(name, shape, torch.empty(shape, device="meta").stride(), 0)


def _located(model: Any, name: str, shape: tuple[int, ...]) -> list[Piece]:
    """Return where the stored pieces of a tensor lie in it."""
    count = torch.Size(shape).numel()
    positions = torch.arange(count, dtype=torch.int32 if count < 2**31 else torch.int64).view(shape)
    return [_piece(new, where) for new, where in _stored(model, name, positions).items()]


def _piece(name: str, where: Tensor) -> Piece:
    """Return a piece from the positions of its elements."""
    shape, offset = tuple(where.shape), int(where.flatten()[0])
    stride = []
    for dim, size in enumerate(shape):
        second = [0] * len(shape)
        second[dim] = min(1, size - 1)
        stride.append(int(where[tuple(second)]) - offset)
    even = torch.full((), offset, dtype=where.dtype)
    for dim, (size, step) in enumerate(zip(shape, stride, strict=True)):
        steps = torch.arange(size, dtype=where.dtype) * step
        even = even + steps.view([-1 if d == dim else 1 for d in range(len(shape))])
    if min(stride, default=1) >= 0 and torch.equal(even.expand(shape), where):
        return Piece(name, shape, tuple(stride), offset)
    return Piece(name, shape, None, offset, where.flatten().long())


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)
