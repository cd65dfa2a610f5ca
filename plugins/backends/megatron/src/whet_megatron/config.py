"""The section `backend:` with `use: megatron`, and its facts for planning. Imports no torch and no Megatron."""

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, Literal

import attrs
from attrs import field, frozen
from attrs.validators import deep_iterable, optional

from whet.component import BackendFacts, MemoryTerm, Problem
from whet.config.bounds import FACTOR, TOKENS, above, below, between
from whet.data.model_info import DTYPE_BYTES, ModelInfo
from whet.interfaces.weights import IN_PLACE
from whet_megatron import fp8, memory, parallel
from whet_megatron.architecture import family, read, refusals
from whet_megatron.fp8 import Fp8Config
from whet_megatron.lora_targets import adapted, has_experts, linears, no_experts
from whet_megatron.parallel import ParallelConfig
from whet_memory.case import Forecast
from whet_training.experts import ExpertsConfig
from whet_training.heads import head_problems, known_teacher, outputs_of, teacher_problems
from whet_training.lora_config import OF_ONE_MODEL, LoraConfig, adapter_info, adapter_memory, computed, unmatched
from whet_training.schedule import ScheduleConfig
from whet_training.weight_groups import WeightGroup, pattern_problems

FORM: Final = "megatron"
"""The form in which weights are lent: `HeldModel` and `Ranks`."""
_NORM: Any = optional(between(0, FACTOR))


@frozen
class OptimizerConfig:
    """AdamW on float32 weights."""

    lr: float = field(default=1.0e-5, validator=above(0, 10))
    """Peak learning rate."""
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=deep_iterable(below(0, 1)))
    """Decay rates of the running means of the gradient and of its square."""
    eps: float = field(default=1.0e-8, validator=above(0, 1))
    """A small number that is added to the root of the mean square."""
    weight_decay: float = field(default=0.0, validator=between(0, 100))
    """Decoupled weight decay of matrices: each step subtracts learning rate x decay x weight. Vectors (norms, biases)
    are not decayed."""
    groups: tuple[WeightGroup, ...] = ()
    """Weights with a learning rate or weight decay of their own, by the names that they have in the model folder.
    Weights that Megatron fuses into one (queries, keys and values; gate and up) go by the name of the first of them."""
    distributed: bool = True
    """Share float32 weights and moments out over the data-parallel ranks (Megatron's distributed optimizer, ZeRO-1:
    Rajbhandari et al. 2020, arXiv:1910.02054). `false`: every one of these ranks holds all of them. A checkpoint does
    not load with the other value; from `true` to `false` it does where the trained weights are float32."""
    overlap: bool = False
    """Add up gradients over data-parallel ranks while the backward pass goes on. Not with virtual pipeline stages."""


@frozen
class MegatronConfig:
    """Models that Megatron Core builds and trains."""

    optimizer: OptimizerConfig = attrs.Factory(OptimizerConfig)
    """The optimizer."""
    schedule: ScheduleConfig = attrs.Factory(ScheduleConfig)
    """The learning rate over optimizer steps."""
    parallel: ParallelConfig = attrs.Factory(ParallelConfig)
    """How ranks share the model."""
    experts: ExpertsConfig = attrs.Factory(ExpertsConfig)
    """Options of mixtures of experts."""
    grouped_experts: bool | Literal["auto"] = "auto"
    """Multiply the matrices of all experts of a rank at once (`moe_grouped_gemm`), which is faster where there are many
    small ones. `auto`: where the layers are Transformer Engine's, which has a kernel for it. With `layers: test` it
    saves no time. Weights and checkpoints are the same."""
    fp8: Fp8Config | None = None
    """Compute the matrix products of layers in FP8, by Transformer Engine on GPUs. null: in the model's dtype."""
    max_grad_norm: float | None = field(default=1.0, validator=_NORM)
    """Gradients are scaled down to this global norm. 0 or null: no clipping."""
    micro_batch_tokens: int = field(default=8192, validator=between(1, TOKENS))
    """Tokens of one forward and backward pass, over all ranks that share a sequence (`parallel.context`). Padding
    counts."""
    layout: Literal["packed", "padded"] = "packed"
    """`packed`: all sequences in one row, without padding (THD). `padded`: a row for each sequence. Both compute the
    same numbers."""
    logprob_chunk: int = field(default=0, validator=between(0, TOKENS))
    """Tokens whose logits are in memory at a time. 0: as many as fill 128 MiB."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """`true`: keep only the inputs of layers for the backward pass and recompute the rest. `selective`: recompute the
    attention alone (Korthikanti et al. 2022, arXiv:2205.05198)."""
    layers: Literal["auto", "transformer-engine", "test"] = "auto"
    """The modules that layers are made of. `transformer-engine`: NVIDIA's, on GPUs. `test`: plain PyTorch, slow; with
    them a CPU tests everything but these modules. `auto`: Transformer Engine on a GPU, `test` on a CPU."""
    vocabulary_multiple: int = field(default=64, validator=between(1, 65_536))
    """The rows of embedding and head on each rank are padded to a multiple of it, because GPUs multiply such matrices
    faster. Padding takes no part in any result, and no export has it."""
    load: str = attrs.field(default="", metadata={"path": True, "other_models": ""})
    """Folder of a checkpoint in the format `torch_dist`, of Megatron-LM or another user of Megatron Core. The run
    begins with its weights in place of those in `model.path`, which gives config and tokenizer. Any parallelism may
    have written it. Its optimizer is not read, and nothing that it holds is run: an index with code is refused."""
    lora: LoraConfig | None = attrs.field(default=None, metadata=OF_ONE_MODEL)
    """Train a small adapter instead of all weights. null: train all weights."""
    reference: bool = attrs.field(default=False, metadata={"policy": True})
    """Hold a frozen copy of the run's first weights, for algorithms that compare the policy with a reference. With
    `lora` there is no copy: the reference is the model without its adapter."""
    teacher: str = attrs.field(default="", metadata={"path": True, "policy": True})
    """Folder of a second, frozen model that the same workers hold, for distillation over the whole vocabulary. Both
    models must have the same vocabulary, and the sizes of `parallel` must divide both."""
    head: Literal["lm", "value"] = "lm"
    """`lm`: a distribution over tokens. `value`: one number for each token, for critics and reward models; the export
    is a sequence classifier with one label. If the model folder has no value head, a new one is drawn from
    N(0, 1/(hidden size + 1)) (Stiennon et al. 2020, arXiv:2009.01325)."""
    head_dtype: Literal["float32"] | None = None
    """`float32`: the logits of `head: lm` are not rounded to bfloat16, in which a logit of 20 is off by up to 0.06
    (ScaleRL, arXiv:2510.13786). An engine that samples must do the same, or logprobs of both differ more than before.
    null: the dtype of the model, as its own code does."""


def facts(config: MegatronConfig, model: ModelInfo) -> BackendFacts:
    """Return the backend's outputs, transports, what does not divide, and the memory of one rank."""
    fits = not any(refusals(model)) and not any(_of_lora(config.lora, model))
    held = {"policy", *["reference"] * config.reference, *["teacher"] * bool(config.teacher)}
    return BackendFacts(
        outputs_given=outputs_of(config.head, config.teacher),
        weights_given=frozenset(held | ({"reference", "base", "trial"} if config.lora else set())),
        adapter=adapter_info(config.lora) if config.lora else None,
        begins_with="load" if config.load else "lora.adapter" if config.lora and config.lora.adapter else "",
        ranks=config.parallel.least_ranks,
        problems=partial(problems, config, model),
        senders=config.parallel.senders,
        transports=(IN_PLACE, "shared", "broadcast", "shared-memory", "disk"),
        in_place=FORM,
        memory=partial(memory_of, config, model) if fits else None,
        imports=("whet_megatron.worker", "whet_megatron.ahead"),
        forkable=True,
        sleeps=("cpu", "cuda"),
        notes=tuple(notes(config, model)),
        packages=(fp8.ENGINE,) if config.fp8 or config.layers == "transformer-engine" else (),
        columns_wanted=config.experts.columns,
        forecast=forecast(config, model) if fits else None,
    )


def forecast(config: MegatronConfig, model: ModelInfo) -> Forecast:
    """Return how the peaks of a rank are predicted."""
    from whet_megatron.forecast import formulas, savings, sizes_of

    settings, sizes = attrs.asdict(config), partial(sizes_of, config)
    return Forecast(settings, model, formulas, config.micro_batch_tokens, savings=savings, sizes=sizes)


def memory_of(config: MegatronConfig, model: ModelInfo, ranks: int, trained: bool) -> Iterator[MemoryTerm]:
    """Yield the memory of one rank of the fullest stage; see `whet_megatron.memory`."""
    lora = computed(config.lora, trained)
    copies, multiple = 1 + (config.reference and lora is None), config.vocabulary_multiple
    yield from memory.terms(
        config.parallel, read(model), model.dtype, ranks, copies, multiple,
        sharded=config.optimizer.distributed, trained=trained and lora is None, value=config.head == "value",
    )  # fmt: skip
    if lora is not None:
        stages = (adapted(lora, model, config.parallel, stage) for stage in range(config.parallel.pipeline))
        yield from adapter_memory(max(sum(one.parameters for one in stage) for stage in stages), trained)
    if config.teacher:  # one that is not here counts as large as the trained model
        found = known_teacher(config.teacher, model)
        held = memory.held(config.parallel, read(model if found is None or any(refusals(found)) else found), multiple)
        yield MemoryTerm("weights of the teacher", DTYPE_BYTES[model.dtype] * sum(held), change="drop backend.teacher")


def notes(config: MegatronConfig, model: ModelInfo) -> Iterator[str]:
    """Yield the sentences of the plan."""
    yield layers_note(config)
    if model.experts:
        where = {True: "at once", False: "one after the other"}
        auto = "at once with Transformer Engine, else one after the other"
        how = auto if config.grouped_experts == "auto" else where[config.grouped_experts]
        yield f"megatron: experts of a rank are multiplied {how} (backend.grouped_experts)"
    if config.fp8:
        yield fp8.note(config.fp8)


def layers_note(config: MegatronConfig) -> str:
    """Return the sentence of the plan about the modules of layers. Which they are is known where the workers run."""
    here = "is" if importlib.util.find_spec("transformer_engine") is not None else "is not"
    engine = f"transformer-engine, which {here} installed here"
    if config.layers == "test":
        return "megatron: the layers are plain PyTorch modules, a test vehicle (backend.layers: test)"
    if config.layers == "transformer-engine":
        return f"megatron: the layers are those of {engine}"
    return f"megatron: on GPUs the layers are those of {engine}; on CPUs plain PyTorch modules, a test vehicle"


def problems(config: MegatronConfig, model: ModelInfo, ranks: int) -> Iterator[Problem]:
    """Yield what the model or a number of ranks does not allow. Paths are within the backend's section."""
    wrong = list(refusals(model))
    for words in wrong:
        yield Problem("use", f"is megatron, and the model {words}; use: fsdp2 may do")
    if not wrong:
        yield from parallel.problems(config.parallel, read(model), config.vocabulary_multiple, ranks)
        yield from _of_lora(config.lora, model)
        if config.fp8:
            yield from fp8.problems(config.fp8, config.parallel, read(model), model.dtype)
        if not read(model).experts and (
            found := [key for key in ("balance", "z_loss") if getattr(config.experts, key)]
        ):
            yield Problem(f"experts.{found[0]}", "is set, and the model has no experts; leave it out")
    yield from head_problems(config.head, model)
    wrong_teacher = list(teacher_problems(config.teacher, model))
    yield from wrong_teacher
    teacher = known_teacher(config.teacher, model)
    if teacher is not None and not wrong_teacher:
        yield from _of_teacher(config, teacher, ranks)


def _of_lora(lora: LoraConfig | None, model: ModelInfo) -> Iterator[Problem]:
    """Yield what the model does not allow of adapters."""
    if lora is None:
        return
    found = family(model)
    rules = found.rules if found is not None else ()
    if lora.experts and not has_experts(rules):
        yield Problem("lora.experts", no_experts(model.architecture))
    names = linears(rules, read(model)) if rules else []
    valid = [target for target in lora.targets if not any(pattern_problems(target, ""))]
    for _, words in unmatched(valid, names, model.architecture):
        yield Problem("lora.targets", words)


def _of_teacher(config: MegatronConfig, teacher: ModelInfo, ranks: int) -> Iterator[Problem]:
    """Yield what the teacher does not allow."""
    wrong = [f"is a model that {words}" for words in refusals(teacher)]
    if not wrong:
        found = parallel.problems(config.parallel, read(teacher), config.vocabulary_multiple, ranks)
        wrong = [f"backend.{one.path} {one.message} (of the teacher)" for one in found]
    yield from (Problem("teacher", words) for words in wrong[:1])
