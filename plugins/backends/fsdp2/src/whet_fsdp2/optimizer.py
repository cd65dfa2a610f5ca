"""One optimizer step: the global gradient norm, clipping, the schedule, and AdamW or Muon."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from whet.errors import CheckpointError
from whet_fsdp2 import checkpoint, eight_bit
from whet_fsdp2.checkpoint import STATE, Saved
from whet_fsdp2.config import OptimizerConfig
from whet_fsdp2.host_state import Bucket, buckets
from whet_fsdp2.muon import Muon
from whet_fsdp2.regions import regions, writes
from whet_fsdp2.sharding import like, local
from whet_fsdp2.weights import PolicyWeights
from whet_training.schedule import ScheduleConfig, learning_rate
from whet_training.weight_groups import Rates, rates, refuse_unmatched
from whet_weights.vectors import is_vector


class Stepper:
    """The optimizer over the float32 master weights of a policy. Its state is indexed by the names of the weights."""

    def __init__(
        self, weights: PolicyWeights, optimizer: OptimizerConfig, schedule: ScheduleConfig, total_steps: int,
        *, offload: bool = False,
    ) -> None:  # fmt: skip
        """`offload`: keep the state in host memory between steps, see `whet_fsdp2.host_state`."""
        self._weights, self._config, self._schedule = weights, optimizer, schedule
        self._total_steps = schedule.total_steps or total_steps
        self.steps = 0
        """Optimizer steps taken."""
        hidden = weights.matrices() if optimizer.kind == "muon" else set()
        others = "adamw" if optimizer.kind == "muon" else optimizer.kind
        self._kinds = {name: "muon" if name in hidden else others for name in weights.trained}
        # AdamW is element by element, so it gets shards as plain tensors. Muon has to know how a matrix is sharded.
        self._stepped = {
            name: local(weight).detach() if self._kinds[name] != "muon" and local(weight) is not weight else weight
            for name, weight in weights.trained.items()
        }
        groups = _groups(self._stepped, self._kinds, weights.inputs_first(), optimizer)
        frozen = {id(one) for of_kind in groups.values() for group in of_kind if not group["peak"]
                  for one in group["params"]}  # fmt: skip
        self._frozen = [name for name, stepped in self._stepped.items() if id(stepped) in frozen]
        self._optimizers: dict[str, torch.optim.Optimizer] = {
            kind: _optimizer(kind, of_kind, optimizer) for kind, of_kind in groups.items()
        }
        self.masters_away = frozenset(weights.copied & set(weights.trained) if offload else ())
        """Names of the weights whose masters live in host memory, too."""
        sizes = [(name, 4 * weights.share(name)) for name in weights.trained]
        self._buckets: list[Bucket] = buckets(sizes, self._offloaded) if offload else []

    def drop_frozen(self) -> None:
        """Free the gradients of weights whose learning rate is always 0: they have no part in the norm."""
        for name in self._frozen:
            self._weights.trained[name].grad = None

    def step(self, norm: float, max_norm: float | None) -> float:
        """Clip by the global norm and take a step. Returns its learning rate."""
        if max_norm and norm > max_norm:
            torch._foreach_mul_(self._weights.gradients(), max_norm / norm)
        rate = self.next_rate()
        gradients = {name: self._take_gradient(name) for name in self._weights.trained}
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = self._rate(group["peak"])
        for names in self.brought():
            for name in names:
                self._stepped[name].grad = gradients.pop(name)
            for optimizer in self._optimizers.values():
                optimizer.step()
            for name in names:
                self._stepped[name].grad = None
            self._weights.push(names)
        self.steps += 1
        return rate

    def _take_gradient(self, name: str) -> Tensor | None:
        """Return the gradient of what the optimizer steps: of a weight, or of this rank's shard of it."""
        weight, stepped = self._weights.trained[name], self._stepped[name]
        gradient = weight.grad
        if stepped is weight:
            weight.grad = None
            return gradient
        # An empty shard has nothing to update, and kernels may refuse it.
        return None if gradient is None or not stepped.numel() else local(gradient)

    def brought(self) -> Iterator[tuple[str, ...]]:
        """Yield names of weights whose state is on the device until the next ones are yielded."""
        if not self._buckets:
            yield tuple(self._weights.trained)
        for bucket in self._buckets:
            with bucket.here() as names:
                yield names

    def _offloaded(self, names: Iterable[str]) -> Iterator[Tensor]:
        """Yield the tensors of some weights that live in host memory."""
        for name in names:
            yield from self._held(name)
            if name in self.masters_away:
                yield local(self._weights.trained[name])

    def next_rate(self) -> float:
        """Return the learning rate of the next step, of the weights that have none of their own."""
        return self._rate(self._config.lr)

    def _rate(self, peak: float) -> float:
        return learning_rate(self._schedule, peak, self.steps + 1, self._total_steps)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments (sharded as the weight) and the step count of each weight that has been updated."""
        return {name: dict(self._state_of(name)) for name in self.taken()}

    def taken(self, names: Iterable[str] | None = None) -> dict[str, float]:
        """Return the steps of each weight that has been updated, of these names or of all."""
        found = {name: self._raw(name) for name in (self._kinds if names is None else names)}
        return {name: float(state["step"]) for name, state in found.items() if state}

    def _raw(self, name: str) -> Mapping[str, Any]:
        """Return the state of a weight as its optimizer has it. Empty: it has taken no step."""
        return self._optimizers[self._kinds[name]].state.get(self._stepped[name]) or {}

    def _state_of(self, name: str) -> Iterator[tuple[str, Tensor]]:
        kind, master = self._kinds[name], self._weights.trained[name]
        state = self._raw(name)
        found = eight_bit.moments(state) if kind == "adamw_8bit" else state
        for key in STATE[kind]:
            yield key, like(local(found[key]), master)
        yield "step", torch.as_tensor(state["step"])

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors of this rank in which the moments are stored."""
        for name in self._kinds:
            yield from self._held(name)

    def _held(self, name: str) -> Iterator[Tensor]:
        kind, state = self._kinds[name], self._raw(name)
        if state:
            yield from eight_bit.held(state) if kind == "adamw_8bit" else (local(state[key]) for key in STATE[kind])

    def parts(self, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the parts of the state that this rank writes into a checkpoint, by their keys.

        State that lives in host memory is yielded as a copy there, with the masters that do.
        """
        for names in self.brought():
            for name in names:
                for key, part in self._parts(name, rank):
                    yield key, part.to("cpu", copy=True) if self._buckets else part

    def _parts(self, name: str, rank: int) -> Iterator[tuple[str, Tensor]]:
        kind, master = self._kinds[name], self._weights.trained[name]
        if name in self.masters_away:
            yield from checkpoint.parts(f"weights/{name}", master, rank)
        state = self._raw(name)
        for key, moment in self._state_of(name) if state else ():
            if key != "step":
                yield from checkpoint.parts(f"{key}/{name}", moment, rank)
        if state and kind == "adamw_8bit" and writes(master, rank):
            for key, scale in eight_bit.scales(state).items():
                yield _scale_key(key, name, master), scale

    def bytes_of_parts(self, rank: int) -> int:
        """Return the number of bytes of the parts, but for scales."""
        trained, away, total = self._weights.trained, self.masters_away, 0
        for name, kind in self._kinds.items():
            if writes(trained[name], rank):
                copies = (name in away) + len(STATE[kind]) * bool(self._raw(name))
                total += copies * 4 * local(trained[name]).numel()
        return total

    def refuse_others(self, saved: Saved) -> None:
        """Raise `CheckpointError` unless this optimizer can go on from the state of a checkpoint."""
        if saved.steps and "muon" in (saved.optimizer, self._config.kind) and saved.optimizer != self._config.kind:
            raise CheckpointError(
                f"{saved.folder} has the state of the optimizer {saved.optimizer}, and backend.optimizer.kind is "
                f"{self._config.kind}; set it to {saved.optimizer}, or export the model and begin a new run with it"
            )
        if strange := sorted(set(saved.steps) - set(self._weights.trained)):
            raise CheckpointError(f"{saved.folder} has optimizer state of {strange[0]}, which is not trained here")

    def load(self, saved: Saved) -> None:
        """Replace all state, and the masters in host memory, by the state of a checkpoint."""
        for optimizer in self._optimizers.values():
            optimizer.state.clear()
        self.steps = saved.optimizer_steps
        for names in self.brought():
            away = [name for name in names if name in self.masters_away]
            saved.read_into((f"weights/{name}", self._weights.trained[name]) for name in away)
            self._weights.push(away)
            for name in names:
                if name in saved.steps:
                    self._load(name, saved.steps[name], saved)

    def _load(self, name: str, step: float, saved: Saved) -> None:
        master, kind, stepped = self._weights.trained[name], self._kinds[name], self._stepped[name]
        moments = {key: torch.zeros_like(stepped) for key in STATE[kind]}
        saved.read_into((f"{key}/{name}", like(local(moment), master)) for key, moment in moments.items())
        if kind == "adamw_8bit":
            self._load_8bit(name, int(step), moments, saved)
            return
        # Each weight has a step counter of its own: AdamW would count a shared one up once for each weight.
        counter = torch.tensor(step, dtype=torch.float32, device=local(master).device)
        self._optimizers[kind].state[stepped] = {"step": counter, **moments}

    def _load_8bit(self, name: str, step: int, moments: dict[str, Tensor], saved: Saved) -> None:
        state = eight_bit.make_state(self._optimizers["adamw_8bit"], self._stepped[name])
        keys = {key: _scale_key(key, name, self._weights.trained[name]) for key in moments}
        known = {key: torch.zeros_like(scale) for key, scale in eight_bit.scales(state).items() if saved.has(keys[key])}
        saved.read_into((keys[key], scale) for key, scale in known.items())
        eight_bit.fill(state, step, moments, known)


def _scale_key(key: str, name: str, master: Tensor) -> str:
    """Return the name of the scales of a shard: those of another layout have another name."""
    found = [f"{','.join(map(str, one.begin))}+{','.join(map(str, one.size))}" for one, _ in regions(master)]
    return f"{key}_scale/{name}:{';'.join(found)}"


def _optimizer(kind: str, groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    if kind == "muon":
        return Muon(groups, config.muon)
    if kind == "adamw_8bit":
        made: torch.optim.Optimizer = eight_bit.adamw(groups, config)
        return made
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _groups(
    trained: dict[str, Tensor], kinds: dict[str, str], inputs_first: set[str], optimizer: OptimizerConfig
) -> dict[str, list[dict[str, Any]]]:
    """Return the groups of parameters of each kind: those with the same rates and order of axes together."""
    own = {}
    for name, weight in trained.items():
        peak = optimizer.lr if kinds[name] != "muon" or optimizer.muon.lr is None else optimizer.muon.lr
        own[name] = Rates(peak, 0.0 if is_vector(name, weight.ndim) else optimizer.weight_decay)
    refuse_unmatched(trained, optimizer.groups)
    found: dict[tuple[str, float, float, bool], list[Tensor]] = {}
    for name, of in rates(own, optimizer.groups).items():
        found.setdefault((kinds[name], of.peak, of.decay, name in inputs_first), []).append(trained[name])
    groups: dict[str, list[dict[str, Any]]] = {}
    for (kind, peak, decay, first), weights in found.items():
        group = {"params": weights, "peak": peak, "lr": peak, "weight_decay": decay, "inputs_first": first}
        groups.setdefault(kind, []).append(group)
    return groups
