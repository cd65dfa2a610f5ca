"""The section `backend:` with `use: fsdp2`, and its facts for planning. Imports no torch."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import attrs
from attrs import field, frozen
from attrs.validators import deep_iterable, optional

from whet.component import BackendFacts, MemoryTerm, Problem
from whet.config.bounds import FACTOR, TOKENS, above, below, between
from whet.data.model_info import ModelInfo
from whet.interfaces.weights import IN_PLACE
from whet_fsdp2.parallel import ParallelConfig, problems
from whet_memory.case import Forecast, Sizes
from whet_training.experts import ExpertsConfig
from whet_training.heads import head_problems, known_teacher, outputs_of, teacher_problems
from whet_training.lora_config import (
    OF_ONE_MODEL,
    LoraConfig,
    adapter_info,
    adapter_memory,
    adapter_parameters,
    computed,
)
from whet_training.schedule import ScheduleConfig
from whet_training.weight_groups import WeightGroup
from whet_weights.lent import TRANSFORMERS

_NORM: Any = optional(between(0, FACTOR))


@frozen
class MuonConfig:
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for matrices in the layers."""

    lr: float | None = field(default=None, validator=optional(above(0, 10)))
    """Peak learning rate of the matrices. null: that of the optimizer, which suits `scale: match_rms_adamw`. With
    `scale: original` 0.02 is usual where a model is trained from the start."""
    momentum: float = field(default=0.95, validator=below(0, 1))
    """Decay rate of the running mean of the gradient."""
    nesterov: bool = True
    """Orthogonalize the mean of the gradient and the running mean, weighted by `momentum`, as Jordan et al. do.
    `false`: the running mean alone."""
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """A factor on the learning rate of a matrix of m outputs and n inputs. `match_rms_adamw`: 0.2 sqrt(max(m, n)), so
    that updates are as large as AdamW's and its learning rates can be kept (Moonlight, arXiv:2502.16982). `original`:
    sqrt(max(1, m / n)) (Jordan et al.)."""
    iterations: int = field(default=5, validator=between(1, 99))
    """Newton-Schulz iterations of one step."""
    coefficients: tuple[float, float, float] = field(
        default=(3.4445, -4.775, 2.0315), validator=deep_iterable(between(-100, 100))
    )
    """a, b and c of an iteration X <- a X + b (X X^T) X + c (X X^T)^2 X. The default brings most singular values to
    between 0.7 and 1.3, fast (Jordan et al.). [1.875, -1.25, 0.375] converges to 1, in more iterations."""
    iteration_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the iterations. The momentum and the weights are always float32."""


@frozen
class OptimizerConfig:
    """AdamW or Muon on float32 weights."""

    kind: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """`adamw`: AdamW for all weights. `adamw_8bit`: AdamW whose two moments have 8 bits, by the package `bitsandbytes`
    (Dettmers et al. 2021, arXiv:2110.02861); those of weights below 4096 numbers keep float32. `muon`: Muon for the
    matrices in the layers, AdamW for everything else: embeddings, heads, norms, biases, and experts that are stacked in
    one tensor."""
    lr: float = field(default=1.0e-5, validator=above(0, 10))
    """Peak learning rate."""
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=deep_iterable(below(0, 1)))
    """Decay rates of AdamW's running means of the gradient and of its square."""
    eps: float = field(default=1.0e-8, validator=above(0, 1))
    """A small number that AdamW adds to the root of the mean square."""
    weight_decay: float = field(default=0.0, validator=between(0, 100))
    """Decoupled weight decay of matrices: each step subtracts learning rate x decay x weight. Vectors (norms, biases)
    are not decayed."""
    muon: MuonConfig = attrs.Factory(MuonConfig)
    """Options of `kind: muon`."""
    groups: tuple[WeightGroup, ...] = ()
    """Weights with a learning rate or weight decay of their own. Each pattern must match a weight."""


@frozen
class Fsdp2Config:
    """Hugging Face models trained by PyTorch: a plain module on one rank, FSDP2 on several."""

    optimizer: OptimizerConfig = attrs.Factory(OptimizerConfig)
    """The optimizer."""
    schedule: ScheduleConfig = attrs.Factory(ScheduleConfig)
    """The learning rate over optimizer steps."""
    parallel: ParallelConfig = attrs.Factory(ParallelConfig)
    """How ranks share the model. By default FSDP2 shards weights, gradients and moments over all ranks."""
    max_grad_norm: float | None = field(default=1.0, validator=_NORM)
    """Gradients are scaled down to this global norm. 0 or null: no clipping."""
    micro_batch_tokens: int = field(default=8192, validator=between(1, TOKENS))
    """Tokens of one forward and backward pass on one rank, or on the ranks of `parallel.context` together, which share
    a row. Padding counts; a shared prompt counts once."""
    layout: Literal["auto", "shared", "packed", "padded"] = "auto"
    """`packed`: no padding. `shared`: no padding, and the common prompt of a group is computed once. `padded`: padded
    rows and the model's own attention. All three compute the same numbers. `auto`: `shared` if the model supports it,
    else `padded`; the backend tests this when it loads the model."""
    logprob_chunk: int = field(default=0, validator=between(0, TOKENS))
    """Tokens whose logits are in memory at a time. 0: as many as fill 128 MiB."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """`true`: keep only the inputs of layers for the backward pass and recompute the rest: less memory, a third slower.
    `selective`: keep results of matrix products and of attention too, and recompute what is cheap: between the two."""
    kernels: tuple[Literal["liger"], ...] = ()
    """Kernels of other packages for GPUs. `liger`: RMS norms, rotations and SwiGLU of `liger-kernel`, which must be
    installed. When the model is loaded they are compared with its own code."""
    compile: bool = False
    """Compile the layers by `torch.compile`, once when the backend starts: up to a minute, and seconds in later runs of
    the same user. It fuses what lies between matrix products. It needs a C++ compiler on a CPU, and Triton on a GPU."""
    offload_optimizer: bool = False
    """Keep the optimizer's moments in host memory, and on one rank in bfloat16 the float32 weights too. Each step
    brings them to the GPU part by part. Numbers are bitwise the same; a step takes the time of the copies longer."""
    reshard_after_forward: bool = True
    """With several ranks: free the gathered weights of a layer between its forward and backward pass."""
    lora: LoraConfig | None = attrs.field(default=None, metadata=OF_ONE_MODEL)
    """Train a small adapter instead of all weights. null: train all weights."""
    reference: bool = attrs.field(default=False, metadata={"policy": True})
    """Hold a frozen copy of the run's first weights, for algorithms that compare the policy with a reference. With
    `lora` there is no copy: the reference is the model without its adapter."""
    teacher: str = attrs.field(default="", metadata={"path": True, "policy": True})
    """Folder of a second, frozen model that the same workers hold, for distillation over the whole vocabulary. Both
    models must have the same vocabulary."""
    experts: ExpertsConfig = attrs.Factory(ExpertsConfig)
    """Options of mixtures of experts."""
    head: Literal["lm", "value"] = "lm"
    """`lm`: a distribution over tokens. `value`: one number for each token, for critics and reward models; the export
    is a sequence classifier with one label. If the model folder has no value head, a new one is drawn from
    N(0, 1/(hidden size + 1)) (Stiennon et al. 2020, arXiv:2009.01325). A role that is not trained needs one."""
    head_dtype: Literal["float32"] | None = None
    """`float32`: the logits of `head: lm` are not rounded to bfloat16, in which a logit of 20 is off by up to 0.06
    (ScaleRL, arXiv:2510.13786). An engine that samples must do the same, or logprobs of both differ more than before.
    null: the dtype of the model, as its own code does."""


def facts(config: Fsdp2Config, model: ModelInfo) -> BackendFacts:
    """Return the backend's outputs, transports, and the memory of weights, gradients and optimizer on one rank."""
    held = {"policy", *["reference"] * config.reference, *["teacher"] * bool(config.teacher)}
    return BackendFacts(
        outputs_given=outputs_of(config.head, config.teacher),
        weights_given=frozenset(held | ({"reference", "base", "trial"} if config.lora else set())),
        adapter=adapter_info(config.lora) if config.lora else None,
        begins_with="lora.adapter" if config.lora and config.lora.adapter else "",
        ranks=config.parallel.least_ranks,
        problems=partial(_problems, config, model),
        transports=(IN_PLACE, "shared", "cuda-ipc", "broadcast", "shared-memory", "disk"),
        in_place=TRANSFORMERS,
        memory=partial(memory, config, model) if model.parameters else None,
        imports=("whet_fsdp2.worker", "transformers.modeling_utils", *model.code),
        forkable=True,
        sleeps=("cpu", "cuda"),
        forecast=forecast(config, model) if model.parameters else None,
        columns_wanted=config.experts.columns,
    )


def _problems(config: Fsdp2Config, model: ModelInfo, ranks: int) -> Iterator[Problem]:
    yield from problems(config.parallel, model, config.layout, ranks)
    yield from head_problems(config.head, model)
    yield from teacher_problems(config.teacher, model)
    if config.compile and model.experts:
        yield Problem("compile", "layers with experts are not compiled; leave it out")


def forecast(config: Fsdp2Config, model: ModelInfo) -> Forecast:
    """Return how the peaks of a rank are predicted."""
    from whet_fsdp2.forecast import formulas, savings

    tokens, settings = config.micro_batch_tokens, attrs.asdict(config)
    trace = "whet_fsdp2.trace:trace"
    teacher = known_teacher(config.teacher, model)
    return Forecast(settings, model, formulas, tokens, trace, savings, partial(sizes, config), teacher)


def sizes(config: Fsdp2Config, ranks: int) -> Sizes:
    """Return the sizes of the parallel axes for a number of ranks."""
    wanted = config.parallel
    shards = max(1, ranks // (wanted.tensor * wanted.context * wanted.replicate))
    return Sizes(shards, wanted.tensor, wanted.context, wanted.expert, wanted.replicate)


def memory(config: Fsdp2Config, model: ModelInfo, ranks: int, trained: bool) -> Iterator[MemoryTerm]:
    """Yield the memory of one rank: its shards, and the tensors that it holds whole. Activations are not counted."""
    model = headed(config, model)
    sizes, low, lora = config.parallel, model.dtype == "bfloat16", computed(config.lora, trained)
    sharing = max(1, ranks // sizes.replicate)  # ranks that hold one copy of the model between them
    number = 2 if low else 4  # bytes of a number in the forward pass
    held = 4 if trained and lora is None else number  # only weights that are trained have float32 masters
    dtype, share = "float32" if held == 4 else "bfloat16", model.parameters // sharing
    over = f", shared out over {sharing} ranks" if sharing > 1 else ""
    spread = "let more ranks share them out (cluster.ranks, cluster.gpus), each where it has memory of its own"
    if model.stored_dtype not in ("", dtype):  # weights of the same dtype are mapped from the file
        yield MemoryTerm(f"the model as it is loaded, in {dtype}{over}", held * share, "loading", "host")
    yield MemoryTerm(f"the model on its GPU as it is loaded, in {dtype}{over}", held * share, "loading", "gpu")
    computing = partial(MemoryTerm, lent=True, woken="adapter", change=spread)
    if lora is not None or not trained:
        yield computing(f"frozen weights in {dtype}{over}", held * share)
    else:
        copied = low and ranks == sizes.tensor  # else FSDP2 casts what it gathers
        place: Literal["", "host"] = "host" if config.offload_optimizer else ""
        # Where a copy in bfloat16 computes, the float32 weights can be elsewhere.
        masters = partial(MemoryTerm, place=place, change=spread) if copied else computing
        yield masters(f"weights in float32{over}", 4 * share)
        yield MemoryTerm(f"gradients in float32{over}", 4 * share, kept_asleep=False, change=spread)
        for what, size in _moments(config, model):
            yield MemoryTerm(f"{what}{over}", size // sharing, place=place, change=spread)
        if copied:
            yield computing(f"weights in bfloat16, which compute{over}", 2 * share)
    if lora is not None:
        yield from adapter_memory(adapter_parameters(lora, model), trained)
    for name, info in _frozen(config, model):
        size = number * info.parameters // sharing
        yield MemoryTerm(f"weights of the {name}{over}", size, change=f"drop backend.{name}")
    if sharing > sizes.tensor:
        whole = number * _gathered(config, model)
        yield MemoryTerm("weights gathered from all ranks, which compute", whole, kept_asleep=False)


def headed(config: Fsdp2Config, model: ModelInfo) -> ModelInfo:
    """Return a model without the head of a language model where a value head takes its place, as a tied one is."""
    change = {"tie_word_embeddings": True} if config.head == "value" else {}
    return attrs.evolve(model, config={**model.config, **change})


def _gathered(config: Fsdp2Config, model: ModelInfo) -> int:
    """Return the parameters that a rank gathers at a time: of one layer, or of all, and those outside the layers."""
    sizes, found = config.parallel, model.config.get("text_config") or model.config
    layer = model.layer_parameters
    if model.experts and sizes.expert > 1:
        experts = _experts_of_layer(model)
        layer -= experts - experts * sizes.tensor // sizes.expert  # experts are not split by tensor parallelism
    layers = 1 if config.reshard_after_forward else found.get("num_hidden_layers") or 1
    return int(min(model.parameters, model.outer_parameters + layers * layer)) // sizes.tensor


def _experts_of_layer(model: ModelInfo) -> int:
    """Return the parameters of the routed experts of a layer. 0: the config does not state their sizes."""
    found = model.config.get("text_config") or model.config
    one = found.get("moe_intermediate_size") or found.get("intermediate_size") or 0
    return int(3 * (found.get("hidden_size") or 0) * one * model.experts)


def _experts(model: ModelInfo) -> int:
    """Return the parameters of the routed experts of all layers, estimated as `ModelInfo.parameters` are."""
    found = {**(model.config.get("text_config") or {}), **model.config, "text_config": None}
    none = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 0)
    dense = attrs.evolve(model, config=found | none)
    more = model.layer_parameters - dense.layer_parameters  # in a layer with experts
    layers = (model.parameters - dense.parameters) // more if more > 0 else 0
    return layers * _experts_of_layer(model)


def _moments(config: Fsdp2Config, model: ModelInfo) -> Iterator[tuple[str, int]]:
    """Yield the moments of the optimizer of all ranks, and their bytes."""
    if config.optimizer.kind == "adamw_8bit":
        yield "AdamW's two moments in 8 bits", 2 * model.parameters + 8 * model.parameters // 256
        return
    # Muon trains all matrices in the layers but stacked experts. Their norms are counted as well.
    inside = model.parameters - model.outer_parameters - _experts(model)
    matrices = max(0, inside) if config.optimizer.kind == "muon" else 0
    if matrices:
        yield "Muon's momentum in float32", 4 * matrices
    of = " of the other weights" if matrices else ""
    yield f"AdamW's two moments{of} in float32", 8 * (model.parameters - matrices)


def _frozen(config: Fsdp2Config, model: ModelInfo) -> Iterator[tuple[str, ModelInfo]]:
    """Yield the frozen models of a rank. A teacher whose folder is not here counts as large as the trained model."""
    if config.reference and config.lora is None:
        yield "reference", model
    if config.teacher:
        yield "teacher", known_teacher(config.teacher, model) or model
