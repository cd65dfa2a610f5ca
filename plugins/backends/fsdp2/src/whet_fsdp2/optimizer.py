"""One optimizer step: the global gradient norm, clipping, the schedule and AdamW."""

import math

import torch
from torch import Tensor

from whet_fsdp2.config import OptimizerConfig, ScheduleConfig
from whet_fsdp2.schedule import learning_rate
from whet_fsdp2.weights import PolicyWeights, local, shard_like

MOMENTS = ("exp_avg", "exp_avg_sq")


class Stepper:
    """AdamW over the float32 master weights of a policy. Its state is indexed by the names of the weights."""

    def __init__(
        self, weights: PolicyWeights, optimizer: OptimizerConfig, schedule: ScheduleConfig, total_steps: int
    ) -> None:
        self._weights, self._schedule, self._peak = weights, schedule, optimizer.lr
        self._total_steps = schedule.total_steps or total_steps
        self.steps = 0
        """Optimizer steps taken."""
        decayed = [p for p in weights.trained.values() if p.ndim >= 2]
        others = [p for p in weights.trained.values() if p.ndim < 2]
        self._adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": optimizer.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            fused=True,
        )

    def square_of_norm(self) -> Tensor:
        """Return the sum of squares of this rank's gradients: a 0-d float64 tensor."""
        gradients = self._weights.gradients()
        if not gradients:
            return torch.zeros((), dtype=torch.float64)
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)
        return torch.stack(norms).square().sum()

    def step(self, norm: float, max_norm: float | None) -> float:
        """Clip by the global norm and take a step. Returns its learning rate."""
        if max_norm and norm > max_norm:
            torch._foreach_mul_(self._weights.gradients(), max_norm / norm)
        rate = learning_rate(self._schedule, self._peak, self.steps + 1, self._total_steps)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._weights.push()
        self.steps += 1
        return rate

    def next_rate(self) -> float:
        """Return the learning rate of the next step."""
        return learning_rate(self._schedule, self._peak, self.steps + 1, self._total_steps)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments (this rank's shards) and the step count of each weight that has been updated."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, master in self._weights.trained.items():
            state = self._adam.state.get(master)
            if state:
                found[name] = {key: state[key] for key in (*MOMENTS, "step")}
        return found

    def put(self, name: str, step: float, moments: dict[str, Tensor]) -> None:
        """Set the state of one weight from full moments."""
        master = self._weights.trained[name]
        state = {key: shard_like(value, master) for key, value in moments.items()}
        # Each weight has a step counter of its own: AdamW would count a shared one up once for each weight.
        count = torch.tensor(step, dtype=torch.float32, device=local(master).device)
        self._adam.state[master] = {"step": count, **state}

    def forget(self) -> None:
        """Drop all state."""
        self._adam.state.clear()


def is_finite(*numbers: float) -> bool:
    """Return whether all numbers are finite."""
    return all(math.isfinite(number) for number in numbers)
