"""The routers of a mixture of experts: record their choices, and replay recorded choices.

    hidden [T, H] -> router -> logits [T, E] -> the k chosen experts [T, k] and their weights [T, k]

`transformers` names the modules that are routers: a model class lists them under `router_logits` of
`_can_record_outputs`. Supported are routers that return (logits, weights, chosen experts), as almost all do, and those
that return probabilities in place of logits (Gemma 4): their logits are what they give to a softmax.

To replay, `torch.topk` returns the recorded experts in place of the highest scores while a router runs. The router
itself computes their weights from its own scores, so every way to normalise weights is kept, and so is the gradient.

Layers and experts of one token are stored in one row of the column `routed_experts` [N, layers * k]: row t holds the
experts that were chosen when token t was the input. -1: not recorded.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final, Literal

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

COLUMN = "routed_experts"
"""The batch column with the experts that the sampler chose."""

Scores = Literal["softmax", "sigmoid"]
SCORING: Final[dict[Any, Scores]] = {
    **dict.fromkeys((torch.softmax, Tensor.softmax, nn.functional.softmax), "softmax"),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, torch.special.expit), "sigmoid"),
}
CLOSE = 1e-2
"""Probabilities that bfloat16 has rounded are this near."""


@frozen(eq=False)
class Routed:
    """The routing of one forward pass through one router."""

    own_logits: Tensor
    """[T, E] the router's own logits."""
    chosen: Tensor
    """[T, k] int64, the experts that computed."""
    own: Tensor
    """[T, k] int64, the experts that the router would have chosen without a replay."""
    scores: Scores = "softmax"
    """The function that scores experts."""

    @property
    def logits(self) -> Tensor:
        """Return logits [T, E] whose softmax is the router's distribution, and whose logsumexp is that of its own.

        With sigmoid scores s the distribution is s / sum of s (arXiv:2412.19437, equation 19).
        """
        if self.scores == "softmax":
            return self.own_logits
        own = self.own_logits.float()
        logs = nn.functional.logsigmoid(own)
        return logs + (own.logsumexp(-1, keepdim=True) - logs.logsumexp(-1, keepdim=True))


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
    experts: int = field(default=0, init=False)
    """E. 0 until `learn`."""
    _scores: Scores = field(default="softmax", init=False)
    _hides_logits: bool = field(default=False, init=False)
    """Whether it returns probabilities in place of logits."""
    _watches: bool = field(default=True, init=False)
    """Whether to keep what it scores experts from."""
    _scored: list[tuple[Scores, Tensor]] = field(factory=list, init=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the router's output, with the recorded experts where there are any."""
        own: list[Tensor] = []
        self._scored = []
        with ExitStack() as modes:
            if self.listens and self._watches:
                modes.enter_context(_Scored(self._scored))
            if self.recorded is not None:
                modes.enter_context(_Replayed(self.recorded.long(), self.experts, own))
            found = self._whole(*args, **kwargs)
        if self.listens:
            logits, _, chosen = found
            if self._hides_logits:
                logits = self._logits_of(logits)
            self.routed = Routed(logits, chosen, own[-1] if own else chosen, self._scores)
            self._scored = self._scored if self.experts == 0 else []
        return found

    def _logits_of(self, chances: Tensor) -> Tensor | None:
        """Return what the probabilities [T, E] are a softmax of. None: it was not seen."""
        return next((one for kind, one in self._scored if kind == "softmax" and one.shape == chances.shape), None)

    def learn(self, one: Routed) -> bool:
        """Find out from the last pass how the router scores experts. Returns whether its logits are known."""
        returned = one.own_logits.float()
        self.experts, sizes = returned.shape[1], (returned.shape[1], one.chosen.shape[1])
        if {kind for kind, given in self._scored if given.shape[-1] in sizes} == {"sigmoid"}:
            self._scores = "sigmoid"
        sums_to_one = ((returned.sum(-1) - 1).abs() < CLOSE).all()
        self._hides_logits = self._watches = len(returned) > 0 and bool((returned >= 0).all() and sums_to_one)
        given, self._scored = self._logits_of(returned), []
        if not self._hides_logits:
            return True
        return given is not None and bool(((given.float().softmax(-1) - returned).abs() < CLOSE).all())

    def undo(self) -> None:
        """Restore the module's own forward pass."""
        self.module.forward = self._whole


class _Scored(TorchFunctionMode):
    """Adds to `scored` what is given to each softmax and sigmoid."""

    def __init__(self, scored: list[tuple[Scores, Tensor]]) -> None:
        super().__init__()
        self._scored = scored

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = SCORING.get(func)
        if kind is not None:
            self._scored.append((kind, args[0] if args else (kwargs or {})["input"]))
        return func(*args, **(kwargs or {}))


class _Replayed(TorchFunctionMode):
    """Makes `torch.topk` over all experts return recorded experts. The experts of its own choice go to `own`."""

    def __init__(self, recorded: Tensor, experts: int, own: list[Tensor]) -> None:
        super().__init__()
        self._recorded, self._experts, self._own = recorded, experts, own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or found[1].shape != self._recorded.shape:
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.shape[-1] != self._experts:  # a choice of groups of experts
            return found
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
    if any(one.chosen.is_floating_point() or one.chosen.ndim != 2 or one.own_logits.ndim != 2 for one in found):
        return f"the routers of {name} do not return logits [T, E], weights [T, k] and experts [T, k]"
    if len({(one.own_logits.shape[1], one.chosen.shape) for one in found}) != 1:
        return f"the layers of {name} have different numbers of experts"
    if not all(router.learn(one) for router, one in zip(routers.routers, found, strict=True)):
        return f"the routers of {name} return probabilities in place of logits"
    routers.experts, routers.chosen = found[0].own_logits.shape[1], found[0].chosen.shape[1]
    # The worst experts in place of the best: a model that ignores the replay is found out.
    other = [one.own_logits.argsort(-1)[:, : one.chosen.shape[1]] for one in found]
    routers.replay(torch.stack(other, 1))
    try:
        routers.listen()
        forward()
        again = routers.take()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        return f"a forward pass of {name} with other experts fails: {error}"
    finally:
        routers.replay(None)
    if any(not torch.equal(one.chosen, wanted) for one, wanted in zip(again, other, strict=True)):
        return f"the routers of {name} do not choose by torch.topk alone"
    return ""
