"""The section `backend:` with `use: fsdp2`, and what planning may know of it. Imports no torch."""

from typing import Literal

import attrs
from attrs import frozen

from whet.component import Facts
from whet.model import ModelInfo


@frozen
class OptimizerConfig:
    """AdamW on float32 weights."""

    lr: float = 1.0e-5
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: float = 1.0e-8
    """Added to the root of the mean square."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; vectors (norms, biases) are not decayed."""


@frozen
class ScheduleConfig:
    """The learning rate over optimizer steps: a linear warm-up, then the chosen kind."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises to its peak."""
    min_ratio: float = 0.0
    """Where `linear` and `cosine` end, as a share of the peak."""
    total_steps: int = 0
    """Optimizer steps at which they end; 0: `run.steps`, which is right where a step takes one optimizer step."""


@frozen
class Fsdp2Config:
    """Hugging Face models trained by PyTorch: a plain module on one rank, FSDP2 on several."""

    optimizer: OptimizerConfig = attrs.Factory(OptimizerConfig)
    """The optimizer."""
    schedule: ScheduleConfig = attrs.Factory(ScheduleConfig)
    """Its learning rate over time."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; 0 or null: never."""
    micro_batch_tokens: int = 8192
    """Tokens of one forward and backward pass on one rank, as laid out: with padding, shared prompts once."""
    layout: Literal["auto", "shared", "packed", "padded"] = "auto"
    """`shared`: no padding, and a prompt that several samples of a group have in common is computed once. `packed`: no
    padding. `padded`: the model's own attention. All three give the same numbers. `auto` is `shared` where the model
    can do it, which is tried when it is loaded, else `padded`."""
    logprob_chunk: int = 0
    """Tokens whose logits are held at a time; 0: as many as fill 128 MiB."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of layers for the backward pass and compute the rest again: less memory, a third slower."""
    reshard_after_forward: bool = True
    """With several ranks: free a layer's gathered weights between its forward and backward pass."""
    reference: bool = attrs.field(default=False, metadata={"policy": True})
    """Hold a frozen copy of the weights that the run started from, for algorithms that compare the policy with it."""
    teacher: str = attrs.field(default="", metadata={"path": True, "policy": True})
    """Folder of a second, frozen model that the same workers hold, for distillation over the whole vocabulary, which
    it must share."""
    head: Literal["lm", "value"] = "lm"
    """`lm`: a distribution over tokens. `value`: one number for each place, as critics and reward models give; it is
    exported as a sequence classifier of one label. A model folder without such a head gets a new one, drawn from
    N(0, 1/(hidden size + 1)) (Stiennon et al. 2020, arXiv:2009.01325)."""


def outputs(config: Fsdp2Config) -> frozenset[str]:
    """Give the outputs that a model with this config has."""
    if config.head == "value":
        return frozenset({"values"})
    divergences = {"kl_forward", "kl_reverse", "jensen_shannon"} if config.teacher else set()
    return frozenset({"logprobs", "entropy", "logprobs_at", "topk_ids", "topk_logprobs", *divergences})


def facts(config: Fsdp2Config, model: ModelInfo) -> Facts:
    """Say what the backend gives, and the memory of weights, gradients and optimizer on one rank."""
    low = model.dtype == "bfloat16"
    frozen = bool(config.reference) + bool(config.teacher)
    per_parameter = 4 + 4 + 8 + (2 if low else 0) + (2 if low else 4) * frozen
    return Facts(
        outputs_given=outputs(config),
        weights_given=frozenset({"policy", *["reference"] * config.reference, *["teacher"] * bool(config.teacher)}),
        transports=("shared", "cuda-ipc", "broadcast", "shared-memory", "tcp", "disk"),
        memory_bytes=model.parameters * per_parameter or None,
        imports=("whet_fsdp2.worker", *model.code),
        forkable=True,
        sleeps=("cpu", "cuda"),
    )
