"""One optimizer step: the global gradient norm, clipping, the schedule, and AdamW or Muon."""

import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from whet.errors import CheckpointError, ConfigError
from whet_fsdp2.checkpoint import STATE, Saved
from whet_fsdp2.config import OptimizerConfig, ScheduleConfig
from whet_fsdp2.muon import Muon
from whet_fsdp2.schedule import learning_rate
from whet_fsdp2.sharding import like, local
from whet_fsdp2.weights import PolicyWeights


class Stepper:
    """The optimizer over the float32 master weights of a policy. Its state is indexed by the names of the weights."""

    def __init__(
        self, weights: PolicyWeights, optimizer: OptimizerConfig, schedule: ScheduleConfig, total_steps: int
    ) -> None:
        self._weights, self._config, self._schedule = weights, optimizer, schedule
        self._total_steps = schedule.total_steps or total_steps
        self.steps = 0
        """Optimizer steps taken."""
        hidden = weights.matrices() if optimizer.kind == "muon" else set()
        self._kinds = {name: "muon" if name in hidden else "adamw" for name in weights.trained}
        # AdamW is element by element, so it gets shards as plain tensors. Muon has to know how a matrix is sharded.
        self._stepped = {
            name: local(weight).detach() if self._kinds[name] == "adamw" and local(weight) is not weight else weight
            for name, weight in weights.trained.items()
        }
        groups = _groups(self._stepped, self._kinds, optimizer)
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        if groups["adamw"]:
            self._optimizers["adamw"] = torch.optim.AdamW(
                groups["adamw"], lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=True
            )
        if groups["muon"]:
            self._optimizers["muon"] = Muon(groups["muon"], optimizer.muon)

    def step(self, norm: float, max_norm: float | None) -> float:
        """Clip by the global norm and take a step. Returns its learning rate."""
        if max_norm and norm > max_norm:
            torch._foreach_mul_(self._weights.gradients(), max_norm / norm)
        rate = self.next_rate()
        for name, weight in self._weights.trained.items():
            stepped = self._stepped[name]
            if stepped is not weight:
                stepped.grad = None if weight.grad is None else local(weight.grad)
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = self._rate(group["peak"])
            optimizer.step()
        for stepped in self._stepped.values():
            stepped.grad = None
        self._weights.push()
        self.steps += 1
        return rate

    def next_rate(self) -> float:
        """Return the learning rate of the next step, of the weights that have none of their own."""
        return self._rate(self._config.lr)

    def _rate(self, peak: float) -> float:
        return learning_rate(self._schedule, peak, self.steps + 1, self._total_steps)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments (sharded as the weight) and the step count of each weight that has been updated."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, master in self._weights.trained.items():
            state = self._optimizers[self._kinds[name]].state.get(self._stepped[name])
            if state:
                moments = {key: like(local(state[key]), master) for key in STATE[self._kinds[name]]}
                found[name] = {**moments, "step": state["step"]}
        return found

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the moments of each weight that has been updated, sharded as the weight, by their names in a file."""
        for name, state in self.state().items():
            for key in STATE[self._kinds[name]]:
                yield f"{key}/{name}", state[key]

    def refuse_others(self, saved: Saved) -> None:
        """Raise `CheckpointError` unless this optimizer can go on from the state of a checkpoint."""
        if saved.steps and saved.optimizer != self._config.kind:
            raise CheckpointError(
                f"{saved.folder} has the state of the optimizer {saved.optimizer}, and backend.optimizer.kind is "
                f"{self._config.kind}; set it to {saved.optimizer}, or export the model and begin a new run with it"
            )
        if strange := sorted(set(saved.steps) - set(self._weights.trained)):
            raise CheckpointError(f"{saved.folder} has optimizer state of {strange[0]}, which is not trained here")

    def load(self, saved: Saved) -> None:
        """Replace all state by that of a checkpoint."""
        for optimizer in self._optimizers.values():
            optimizer.state.clear()
        self.steps = saved.optimizer_steps
        for name, step in saved.steps.items():
            master, kind, stepped = self._weights.trained[name], self._kinds[name], self._stepped[name]
            # Each weight has a step counter of its own: AdamW would count a shared one up once for each weight.
            counter = torch.tensor(step, dtype=torch.float32, device=local(master).device)
            moments = {key: torch.zeros_like(stepped) for key in STATE[kind]}
            saved.read_into((f"{key}/{name}", like(local(moment), master)) for key, moment in moments.items())
            self._optimizers[kind].state[stepped] = {"step": counter, **moments}


def _groups(
    trained: dict[str, Tensor], kinds: dict[str, str], optimizer: OptimizerConfig
) -> dict[str, list[dict[str, object]]]:
    """Return the groups of parameters of each kind: those with the same peak learning rate and decay together."""
    found: dict[tuple[str, float, float], list[Tensor]] = {}
    hits = [0] * len(optimizer.groups)
    for name, weight in trained.items():
        kind = kinds[name]
        peak = optimizer.lr if kind == "adamw" or optimizer.muon.lr is None else optimizer.muon.lr
        decay = optimizer.weight_decay if weight.ndim >= 2 else 0.0
        number = next((n for n, group in enumerate(optimizer.groups) if re.search(group.match, name)), None)
        if number is not None:
            group = optimizer.groups[number]
            hits[number] += 1
            peak = (peak if group.lr is None else group.lr) * group.lr_factor
            decay = decay if group.weight_decay is None else group.weight_decay
        found.setdefault((kind, peak, decay), []).append(weight)
    for number, group in enumerate(optimizer.groups):
        if trained and not hits[number]:
            earlier = ", that no group before it matches" if any(re.search(group.match, n) for n in trained) else ""
            raise ConfigError(
                f"backend.optimizer.groups.{number}.match: {group.match!r} matches no weight{earlier}; the model has "
                f"{len(trained)} weights: {', '.join(list(trained)[:3])} and so on"
            )
    groups: dict[str, list[dict[str, object]]] = {"adamw": [], "muon": []}
    for (kind, peak, decay), weights in found.items():
        groups[kind].append({"params": weights, "peak": peak, "lr": peak, "weight_decay": decay})
    return groups


def is_finite(*numbers: float) -> bool:
    """Return whether all numbers are finite."""
    return all(math.isfinite(number) for number in numbers)
