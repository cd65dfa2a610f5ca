"""One optimizer step: Megatron's gradient norm, clipping and AdamW, with the rates of this backend."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from whet_megatron.config import MegatronConfig
from whet_megatron.cpu_shim import optimizer_types
from whet_megatron.model import HeldModel
from whet_megatron.torch_adamw import begin, count, own_steps, torch_adamw
from whet_training.schedule import learning_rate
from whet_training.weight_groups import Rates, rates, refuse_unmatched
from whet_weights.vectors import is_vector


class Stepper:
    """Megatron's optimizer over the stages of a rank."""

    def __init__(self, model: HeldModel, config: MegatronConfig, total_steps: int) -> None:
        from megatron.core.optimizer import get_megatron_optimizer

        self._model, self._config = model, config
        self._total_steps = config.schedule.total_steps or total_steps
        self.steps = 0
        """Optimizer steps taken."""
        self.distributed = config.optimizer.distributed
        with optimizer_types():
            self.optimizer: Any = get_megatron_optimizer(
                self._options(), model.chunks, config_overrides=self._overrides()
            )

    def _overrides(self) -> dict[Any, dict[str, float]]:
        """Return Megatron's settings for the parameters that share a learning rate and a decay.

        They are factors, because Megatron finds the groups of a checkpoint by them.
        """
        from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

        of = self._config.optimizer
        refuse_unmatched(sorted(self._model.trained_names), of.groups)
        members: dict[Rates, set[int]] = {}
        for name, parameter in self._model.trained():
            own = Rates(of.lr, 0.0 if is_vector(name, parameter.ndim) else of.weight_decay)
            members.setdefault(rates({name: own}, of.groups)[name], set()).add(id(parameter))

        def key(number: int, ids: set[int]) -> Any:
            return ParamKey(predicate=ParamPredicate(name=f"whet-{number}", fn=lambda parameter: id(parameter) in ids))

        return {
            key(number, ids): {"lr_mult": one.peak / of.lr, "wd_mult": one.decay / (of.weight_decay or 1.0)}
            for number, (one, ids) in enumerate(members.items())
        }

    def _options(self) -> Any:
        from megatron.core.optimizer import OptimizerConfig

        of = self._config.optimizer
        return OptimizerConfig(
            optimizer="adam",
            lr=of.lr,
            weight_decay=of.weight_decay,
            adam_beta1=of.betas[0],
            adam_beta2=of.betas[1],
            adam_eps=of.eps,
            bf16=self._model.trained_dtype == torch.bfloat16,
            params_dtype=self._model.trained_dtype,
            use_distributed_optimizer=of.distributed,
            clip_grad=self._config.max_grad_norm or 0.0,
        )

    @torch.no_grad()
    def norm(self) -> float:
        """Return the norm of the gradient over all ranks. The schedules have added gradients up before.

        Weights whose learning rate is always 0 have no part in it.
        """
        with optimizer_types():
            self.optimizer.prepare_grads()
            for group in self.optimizer.param_groups:
                for parameter in group["params"] if not group["lr_mult"] else ():
                    if parameter.grad is not None:
                        parameter.grad.zero_()
            return float(self.optimizer.get_grad_norm())

    @torch.no_grad()
    def step(self, norm: float) -> float:
        """Clip by the global norm and take a step. Returns its learning rate. `norm` comes from the method `norm`."""
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        rate, of = self.next_rate(), self._config.optimizer
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(of.lr * group["lr_mult"])
            group["weight_decay"] = group["wd_mult"] * (of.weight_decay or 1.0)
            group["betas"], group["eps"] = of.betas, of.eps
        with optimizer_types():
            if self._config.max_grad_norm:
                for one in self.optimizer.chained_optimizers:
                    if parameters := one.get_parameters():
                        clip_grad_by_total_norm_fp32(parameters, self._config.max_grad_norm, norm)
            self.optimizer.step_with_ready_grads()
        self.steps += 1
        return rate

    def next_rate(self) -> float:
        """Return the learning rate of the next step, of the weights that have none of their own."""
        return self._rate(self._config.optimizer.lr)

    def _rate(self, peak: float) -> float:
        return learning_rate(self._config.schedule, peak, self.steps + 1, self._total_steps)

    def drop_gradients(self) -> None:
        """Set all gradients to zero."""
        for stage in self._model.chunks:
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()

    def sharded_state(self, model: dict[str, Any], metadata: dict[str, Any], *, loading: bool) -> Any:
        """Return the state as Megatron describes it in a checkpoint. `model`: the description of the weights."""
        begin(self._inner())
        with optimizer_types():
            return self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)

    def load(self, state: Any, steps: int) -> None:
        """Replace all state by that of a checkpoint."""
        count(state, steps)
        with optimizer_types(), torch_adamw():
            self.optimizer.load_state_dict(state)
        own_steps(self._inner(), steps)
        self.steps = steps

    def _inner(self) -> list[Any]:
        """Return the optimizers that Megatron's wrap."""
        return [one.optimizer for one in self.optimizer.chained_optimizers if one.optimizer is not None]

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors of this rank in which float32 weights and moments are stored."""
        for one in self.optimizer.chained_optimizers:
            yield from one.get_parameters()
            inner = one.optimizer
            for state in inner.state.values() if inner is not None else ():
                yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim)
