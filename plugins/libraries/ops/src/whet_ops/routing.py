"""The routers of a mixture of experts: record their choices, and replay recorded choices.

    hidden [T, H] -> router -> logits [T, E] -> the k chosen experts [T, k] and their weights [T, k]

`transformers` names the modules that are routers: a model class lists them under `router_logits` of
`_can_record_outputs`. Supported are routers that return (logits, weights, chosen experts), as almost all do.

To replay, `torch.topk` returns the recorded experts in place of the highest scores while a router runs. The router
itself computes their weights from its own scores, so every way to normalise weights is kept, and so is the gradient.

Layers and experts of one token are stored in one row of the column `routed_experts` [N, layers * k]: row t holds the
experts that were chosen when token t was the input. -1: not recorded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

COLUMN = "routed_experts"
"""The batch column with the experts that the sampler chose."""


@frozen(eq=False)
class Routed:
    """The routing of one forward pass through one router."""

    logits: Tensor
    """[T, E]."""
    chosen: Tensor
    """[T, k] int64, the experts that computed."""
    own: Tensor
    """[T, k] int64, the experts that the router would have chosen without a replay."""


@define(eq=False)
class Router:
    """The forward pass of one router."""

    module: nn.Module
    _whole: Callable[..., Any]
    recorded: Tensor | None = field(default=None, init=False)
    """[T, k] experts to replay in the next forward pass and in its backward pass, -1 where the router chooses."""
    routed: Routed | None = field(default=None, init=False)
    """The routing of the last forward pass while the router listened."""
    listens: bool = field(default=False, init=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the router's output, with the recorded experts where there are any."""
        own: list[Tensor] = []
        if self.recorded is None:
            found = self._whole(*args, **kwargs)
        else:
            with _Replayed(self.recorded.long(), own):
                found = self._whole(*args, **kwargs)
        if self.listens:
            logits, _, chosen = found
            self.routed = Routed(logits, chosen, own[-1] if own else chosen)
        return found

    def undo(self) -> None:
        """Restore the module's own forward pass."""
        self.module.forward = self._whole


class _Replayed(TorchFunctionMode):
    """Makes `torch.topk` over all experts return recorded experts. The experts of its own choice go to `own`."""

    def __init__(self, recorded: Tensor, own: list[Tensor]) -> None:
        super().__init__()
        self._recorded, self._own = recorded, own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or found[1].shape != self._recorded.shape:
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        self._own.append(found[1])
        chosen = torch.where(self._recorded >= 0, self._recorded, found[1])
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


class Routers:
    """All routers of a model, in the order of its layers."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self.routers = tuple(routers)
        self.experts = self.chosen = 0
        """The number of experts of a layer, and of those that compute a token. `problem_of` finds them."""

    def __len__(self) -> int:
        return len(self.routers)

    def listen(self) -> None:
        """Keep the routing of the next forward pass. A pass that is recomputed after `take` is not kept."""
        for router in self.routers:
            router.listens, router.routed = True, None

    def take(self) -> list[Routed]:
        """Return the routing of the pass after `listen`, of each layer, and forget it."""
        found = [router.routed for router in self.routers if router.routed is not None]
        for router in self.routers:
            router.listens, router.routed = False, None
        return found

    def replay(self, recorded: Tensor | None) -> None:
        """Set the experts of the next forward pass and of its backward pass. recorded [T, layers, k], -1: free."""
        for layer, router in enumerate(self.routers):
            router.recorded = None if recorded is None else recorded[:, layer]


def find_routers(model: Any) -> Routers:
    """Return the routers of a `transformers` model, by what its classes say. None are found in a dense model."""
    from transformers.modeling_utils import PreTrainedModel

    recorders: list[tuple[str, Any]] = []
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel):
            found = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", ())
            recorders += [(name, one) for one in (found if isinstance(found, list | tuple) else [found])]
    routers = []
    for name, module in model.named_modules():
        if any(_records(one, module, name) for owner, one in recorders if name.startswith(owner)):
            routers.append(Router(module, module.forward))
            module.forward = routers[-1]
    return Routers(routers)


def _records(recorder: Any, module: nn.Module, name: str) -> bool:
    """Return whether an `OutputRecorder`, or a class in its place, means a module."""
    target = getattr(recorder, "target_class", recorder)
    layer = getattr(recorder, "layer_name", None)
    if not isinstance(target, type) or not isinstance(module, target):
        return False
    return layer is None or f".{layer.strip('.')}." in f".{name}."


@torch.no_grad()
def problem_of(routers: Routers, model: Any, forward: Callable[[], Any]) -> str:
    """Return why routing cannot be recorded and replayed. Empty: it can. `forward` passes a few tokens through."""
    name = type(model).__name__
    try:
        routers.listen()
        forward()
        found = routers.take()
    except (TypeError, ValueError) as error:
        return f"the routers of {name} do not return logits, weights and experts: {error}"
    if not routers.routers or len(found) != len(routers):
        return f"{name} has no routers that transformers can record"
    if any(one.chosen.is_floating_point() or one.chosen.ndim != 2 or one.logits.ndim != 2 for one in found):
        return f"the routers of {name} do not return logits [T, E], weights [T, k] and experts [T, k]"
    if len({(one.logits.shape[1], one.chosen.shape) for one in found}) != 1:
        return f"the layers of {name} have different numbers of experts"
    routers.experts, routers.chosen = found[0].logits.shape[1], found[0].chosen.shape[1]
    # The worst experts in place of the best: a model that ignores the replay is found out.
    other = [one.logits.argsort(-1)[:, : one.chosen.shape[1]] for one in found]
    routers.replay(torch.stack(other, 1))
    try:
        routers.listen()
        forward()
        again = routers.take()
    finally:
        routers.replay(None)
    if any(not torch.equal(one.chosen, wanted) for one, wanted in zip(again, other, strict=True)):
        return f"the routers of {name} do not choose by torch.topk alone"
    return ""
