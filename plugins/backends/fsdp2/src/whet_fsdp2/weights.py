"""The weights of a policy on one rank: float32 masters, and the copies for the forward pass."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from whet_fsdp2.root import AnyRoot
from whet_fsdp2.sharding import copies, full, is_split, kept_in_float32, local, partial_names, sum_partial, tensor_group
from whet_weights.vectors import is_vector

NORM_PIECE: Final = 1 << 21
"""Numbers of a gradient whose norm is computed at a time, because on CPUs a copy in float64 is made of them."""


class PolicyWeights:
    """Float32 master weights that the optimizer updates, by their names in `transformers`.

    With FSDP2, and in float32, the masters are the module's own parameters (FSDP2 casts them when it gathers them). In
    bfloat16 without FSDP2 the module holds a bfloat16 copy, except of weights that the model keeps in float32. Its
    gradients are added to the float32 gradients of the masters as soon as they are complete.
    """

    def __init__(
        self, root: AnyRoot, low_precision: bool, ranks: int = 1, compute: torch.dtype = torch.float32
    ) -> None:
        """`low_precision`: hold copies in bfloat16 for the forward pass. `compute`: the dtype of the forward pass."""
        self.root, self._ranks, self._compute = root, ranks, compute
        self._low: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self.masters: dict[str, Tensor] = {}
        """This rank's shards, of all weights."""
        self._kept = kept_in_float32(root.model)
        for name, parameter in list(root.model.named_parameters()):
            if low_precision and name not in self._kept:
                master = parameter.detach().clone()
                copy = _lowered(root.model, parameter)
                if copy.requires_grad:
                    copy.register_post_accumulate_grad_hook(_add_into(master))
                self._low[name] = copy, master
                self.masters[name] = master
            else:
                self.masters[name] = parameter
        self.trained = {
            name: self.masters[name] for name, p in root.model.named_parameters() if p.requires_grad
        }  # fmt: skip
        self._group = tensor_group(root.model)
        self._partial = partial_names(root.model) & set(self.trained) if self._group is not None else set()
        # A shard is FSDP2's to average, or one tensor parallel rank's own: other ranks have other numbers.
        whole = {name for name, weight in self.trained.items() if not is_split(weight)}
        self._whole = self._kept & whole if ranks > 1 else set()

    @torch.no_grad()
    def push(self, names: Iterable[str]) -> None:
        """Copy the values of masters to their bfloat16 copies."""
        for name in names:
            if name in self._low:
                parameter, master = self._low[name]
                parameter.copy_(master)

    @property
    def copied(self) -> set[str]:
        """Return the names of the weights of which the module holds a bfloat16 copy."""
        return set(self._low)

    def share(self, name: str) -> int:
        """Return how many numbers of a weight a rank holds: the same on every rank, and the mean if they differ."""
        master = self.masters[name]
        return int(master.numel() * copies(master, self._ranks) / self._ranks)

    def drop_gradients(self) -> None:
        """Free the gradients."""
        for master in self.masters.values():
            master.grad = None

    def gradients(self) -> list[Tensor]:
        """Return this rank's shards of all gradients."""
        return [local(master.grad) for master in self.trained.values() if master.grad is not None]

    def complete_gradients(self) -> None:
        """Shard each gradient as its weight, and add up what tensor parallel ranks have of it. Once for each step."""
        if self._group is not None:
            for master in self.trained.values():
                gradient, placements = master.grad, getattr(master, "placements", None)
                if isinstance(gradient, DTensor) and gradient.placements != placements:
                    master.grad = gradient.redistribute(placements=placements)
        sum_partial(self._gradients_of(self._partial), self._group)
        # FSDP2 leaves these out. It would take the mean over ranks with other data; the others have the same gradient.
        sum_partial(self._gradients_of(self._whole), None, self._ranks)

    def _gradients_of(self, names: set[str]) -> list[Tensor]:
        found = [self.trained[name].grad for name in sorted(names)]
        return [local(gradient) for gradient in found if gradient is not None]

    def matrices(self) -> set[str]:
        """Return the names of the matrices in the layers: see the function `matrices`."""
        return matrices(self.root)

    def inputs_first(self) -> set[str]:
        """Return the names of the matrices that layers store as [inputs, outputs], as GPT-2 does."""
        from transformers.pytorch_utils import Conv1D

        return {f"{name}.weight" for name, module in self.root.model.named_modules() if isinstance(module, Conv1D)}

    def square_of_norm(self) -> Tensor:
        """Return this rank's part of the square of the gradient's global norm: a 0-d float64 tensor.

        The sum over all ranks is the square: each number counts once, however many ranks hold it.
        """
        by_copies: dict[float, list[Tensor]] = {}
        for master in self.trained.values():
            if master.grad is not None:
                pieces = torch.split(local(master.grad).reshape(-1), NORM_PIECE)
                by_copies.setdefault(copies(master.grad, self._ranks), []).extend(pieces)
        total = torch.zeros((), dtype=torch.float64)
        for count, gradients in by_copies.items():
            norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)
            total = total + (torch.stack(norms).square().sum() / count).cpu()
        return total

    @torch.no_grad()
    def computing(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of the weights that the forward pass uses. Every rank must iterate to the end."""
        low = {id(master): parameter for parameter, master in self._low.values()}
        for name, master in self.masters.items():
            used = low.get(id(master), master).detach()
            yield name, full(used if name in self._kept else used.to(self._compute))
        for name, buffer in persistent_buffers(self.root.model):
            yield name, buffer


def _lowered(model: nn.Module, parameter: Any) -> Any:
    """Return a parameter in bfloat16, in its place in the model. Setting the data of a DTensor leaves its shard."""
    if isinstance(parameter, DTensor):
        low = nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=parameter.requires_grad)
        for module in model.modules():
            places = [name for name, own in module._parameters.items() if own is parameter]
            module._parameters.update(dict.fromkeys(places, low))
        return low
    parameter.data = parameter.data.to(torch.bfloat16)
    return parameter


def _add_into(master: Tensor) -> Any:
    def add(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return add


def matrices(root: AnyRoot) -> set[str]:
    """Return the names of the matrices in the layers: the weights of linear layers and of routers, but of no head.

    Other parameters of two dimensions are stacked vectors (biases of experts, norms of heads) or stacked experts.
    """
    model = root.model
    head = model.get_output_embeddings()
    outer = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    others = {id(parameter) for module in outer for parameter in module.parameters()}
    inside = {id(parameter) for parameter in model.base_model.parameters() if parameter.ndim == 2} - others
    return {
        name for name, parameter in model.named_parameters()
        if id(parameter) in inside and name.endswith(".weight") and not is_vector(name, 2)
    }  # fmt: skip


def persistent_buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a saved model contains."""
    kept = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in kept:
            yield name, buffer
