"""One optimizer step: the global gradient norm, clipping, the schedule, and AdamW or Muon."""

import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from whet.errors import CheckpointError, ConfigError
from whet_fsdp2 import checkpoint, eight_bit
from whet_fsdp2.checkpoint import STATE, Saved
from whet_fsdp2.config import OptimizerConfig, ScheduleConfig
from whet_fsdp2.muon import Muon
from whet_fsdp2.regions import regions, writes
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
        others = "adamw" if optimizer.kind == "muon" else optimizer.kind
        self._kinds = {name: "muon" if name in hidden else others for name in weights.trained}
        # AdamW is element by element, so it gets shards as plain tensors. Muon has to know how a matrix is sharded.
        self._stepped = {
            name: local(weight).detach() if self._kinds[name] != "muon" and local(weight) is not weight else weight
            for name, weight in weights.trained.items()
        }
        groups = _groups(self._stepped, self._kinds, optimizer)
        self._optimizers: dict[str, torch.optim.Optimizer] = {
            kind: _optimizer(kind, of_kind, optimizer) for kind, of_kind in groups.items()
        }

    def step(self, norm: float, max_norm: float | None) -> float:
        """Clip by the global norm and take a step. Returns its learning rate."""
        if max_norm and norm > max_norm:
            torch._foreach_mul_(self._weights.gradients(), max_norm / norm)
        rate = self.next_rate()
        for name, weight in self._weights.trained.items():
            stepped = self._stepped[name]
            if stepped is not weight:  # an empty shard has nothing to update, and kernels may refuse it
                stepped.grad = None if weight.grad is None or not stepped.numel() else local(weight.grad)
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
        return {name: dict(self._state_of(name)) for name in self.taken()}

    def taken(self) -> dict[str, float]:
        """Return the steps of each weight that has been updated."""
        found = {name: self._optimizers[kind].state.get(self._stepped[name]) for name, kind in self._kinds.items()}
        return {name: float(state["step"]) for name, state in found.items() if state}

    def _state_of(self, name: str) -> Iterator[tuple[str, Tensor]]:
        kind, master = self._kinds[name], self._weights.trained[name]
        state = self._optimizers[kind].state[self._stepped[name]]
        found = eight_bit.moments(state) if kind == "adamw_8bit" else state
        for key in STATE[kind]:
            yield key, like(local(found[key]), master)
        yield "step", torch.as_tensor(state["step"])

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors of this rank in which the moments are stored."""
        for name in self.taken():
            kind = self._kinds[name]
            state = self._optimizers[kind].state[self._stepped[name]]
            yield from eight_bit.held(state) if kind == "adamw_8bit" else (local(state[key]) for key in STATE[kind])

    def parts(self, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the parts of the state that this rank writes into a checkpoint, by their keys."""
        for name in self.taken():
            kind, master = self._kinds[name], self._weights.trained[name]
            for key, moment in self._state_of(name):
                if key != "step":
                    yield from checkpoint.parts(f"{key}/{name}", moment, rank)
            if kind == "adamw_8bit" and writes(master, rank):
                for key, scale in eight_bit.scales(self._optimizers[kind].state[self._stepped[name]]).items():
                    yield _scale_key(key, name, master), scale

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
        """Replace all state by that of a checkpoint."""
        for optimizer in self._optimizers.values():
            optimizer.state.clear()
        self.steps = saved.optimizer_steps
        for name, step in saved.steps.items():
            master, kind, stepped = self._weights.trained[name], self._kinds[name], self._stepped[name]
            moments = {key: torch.zeros_like(stepped) for key in STATE[kind]}
            saved.read_into((f"{key}/{name}", like(local(moment), master)) for key, moment in moments.items())
            if kind == "adamw_8bit":
                self._load_8bit(name, int(step), moments, saved)
                continue
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


def _optimizer(kind: str, groups: list[dict[str, object]], config: OptimizerConfig) -> torch.optim.Optimizer:
    if kind == "muon":
        return Muon(groups, config.muon)
    if kind == "adamw_8bit":
        made: torch.optim.Optimizer = eight_bit.adamw(groups, config)
        return made
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _groups(
    trained: dict[str, Tensor], kinds: dict[str, str], optimizer: OptimizerConfig
) -> dict[str, list[dict[str, object]]]:
    """Return the groups of parameters of each kind: those with the same peak learning rate and decay together."""
    found: dict[tuple[str, float, float], list[Tensor]] = {}
    hits = [0] * len(optimizer.groups)
    for name, weight in trained.items():
        kind = kinds[name]
        peak = optimizer.lr if kind != "muon" or optimizer.muon.lr is None else optimizer.muon.lr
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
    groups: dict[str, list[dict[str, object]]] = {}
    for (kind, peak, decay), weights in found.items():
        groups.setdefault(kind, []).append({"params": weights, "peak": peak, "lr": peak, "weight_decay": decay})
    return groups


def is_finite(*numbers: float) -> bool:
    """Return whether all numbers are finite."""
    return all(math.isfinite(number) for number in numbers)
