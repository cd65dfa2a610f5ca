"""A training step on tensors without memory: the model's own class and this backend's own code, and no weights.

`whet_memory` runs this with few layers and extrapolates. What differs from `Worker` is the start alone: the module is
built from `config.json` on the meta device, and shortcuts are applied without a comparison of numbers.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import initialization as init

from whet.config.structure import structure
from whet.data.batch import Batch, from_sequences
from whet.interfaces.workers import WorkerRank
from whet_fsdp2 import attention, norms, varlen
from whet_fsdp2.checkpointing import enable_checkpointing
from whet_fsdp2.config import Fsdp2Config
from whet_fsdp2.feed import Feed, feed, spread
from whet_fsdp2.forecast import not_held, with_adamw
from whet_fsdp2.loading import logit_rules
from whet_fsdp2.lora import Adapters, AdapterWeights
from whet_fsdp2.narrowed import narrow
from whet_fsdp2.optimizer import Stepper
from whet_fsdp2.ranks import Ranks
from whet_fsdp2.root import AnyRoot, Root, ValueRoot
from whet_fsdp2.sharding import sharding
from whet_fsdp2.weights import PolicyWeights
from whet_memory.case import Case
from whet_memory.live_bytes import LiveBytes, fake_ranks, fake_tensors
from whet_memory.timelines import Timeline, depths, shortened
from whet_ops import logprobs
from whet_training.layout import Layout
from whet_training.lora_config import computed

ROWS = "whet_packed_rows"
"""The attention of GPUs."""
CPU = torch.device("cpu")


def trace(case: Case) -> dict[str, Timeline]:
    """Return the live bytes after each operation of `forward`, `backward`, `optimizer` and `idle`, or of `score`.

    Moments of 8 bits, or in host memory, are traced as AdamW's in float32. What is held less is subtracted.
    """
    with fake_ranks(case.sizes.ranks):  # and their meshes, before tensors are fake
        found = _trace(case)
    less, brought = not_held(case)
    less -= _taught(case)[1]
    more = {"optimizer": brought}
    return {phase: [(name, size - less + more.get(phase, 0)) for name, size in line] for phase, line in found.items()}


def _trace(case: Case) -> dict[str, Timeline]:
    config = with_adamw(structure(dict(case.settings), Fsdp2Config, None))
    low, size = case.model.dtype == "bfloat16", case.sizes.ranks
    ranks = Ranks(WorkerRank("backend", 0, size), config.parallel)
    attention.register()
    root, adapters = _build(case, config, ranks, trained=case.trained)
    wanted = [case] * (config.reference and config.lora is None) + [_taught(case)[0]] * bool(config.teacher)
    frozen = [_build(one, attrs.evolve(config, lora=None), ranks, trained=False)[0] for one in wanted]
    if config.teacher and isinstance(root, Root) and isinstance(frozen[-1], Root):
        root.teacher = (frozen[-1],)
    with fake_tensors() as live, _few_chunks(case.outputs), _experts_of_any_dtype(), _even_experts(live, case):
        for built in (root, *frozen):
            _allocate(built.model)
        layout: Layout = "packed" if root.model.config._attn_implementation in (attention.NAME, ROWS) else "padded"
        weights: PolicyWeights
        if adapters is not None and config.lora is not None:
            adapters.allocate(start=bool(config.lora.adapter))
            weights = AdapterWeights(root, adapters, size, ranks.grid.averaged)
        else:
            copied = low and case.trained and ranks.grid.averaged == 1
            weights = PolicyWeights(root, copied, size, torch.bfloat16 if low else torch.float32)
        stepper = Stepper(weights, config.optimizer, config.schedule, 10)
        one = feed(_batch(case), layout, CPU, ranks.context)
        if case.trained:
            _make_moments(weights, stepper)
            _train(live, root, weights, stepper, one, case)
        else:
            with live.phase("score"), torch.no_grad():
                root(one, case.outputs)
        with live.phase("idle"):
            pass
    return dict(live.timelines)


def _taught(case: Case) -> tuple[Case, int]:
    """Return the case of a teacher of few layers, and the bytes of its other layers on this rank.

    Its passes keep nothing of a layer for the next one, so weights are all that grows with layers.
    """
    if case.teacher is None:
        return case, 0
    few = attrs.evolve(case.teacher, config=shortened(case.teacher.config, depths(case.teacher.config)[0]))
    sharing = max(1, case.sizes.ranks // case.sizes.replicate)
    number = 2 if case.model.dtype == "bfloat16" else 4
    left = number * (case.teacher.parameters - few.parameters) // sharing
    return attrs.evolve(case, model=attrs.evolve(few, dtype=case.model.dtype)), left


@contextmanager
def _few_chunks(outputs: Sequence[str]) -> Iterator[None]:
    """Compute three chunks of the logits in place of all: every chunk holds and frees the same. It halves the trace.

    Divergences join what all chunks return, so they need them all.
    """
    real = logprobs._parts

    def few(count: int, chunk: int) -> list[slice]:
        found = real(count, chunk)
        return found if len(found) < 4 else [*found[:2], found[-1]]

    if not any(name.startswith(("kl_", "jensen")) for name in outputs):
        logprobs._parts = few
    try:
        yield
    finally:
        logprobs._parts = real


@contextmanager
def _experts_of_any_dtype() -> Iterator[None]:
    """Compute experts in float32 by an operation of transformers, whose results have the same shapes.

    PyTorch's `_grouped_mm` computes float32 on a CPU, but refuses fake tensors of it.
    """
    from transformers.integrations import moe

    real = getattr(moe, "_can_use_grouped_mm", None)
    if real is not None:
        moe._can_use_grouped_mm = lambda _, weight, __: weight.dtype == torch.bfloat16
    try:
        yield
    finally:
        if real is not None:
            moe._can_use_grouped_mm = real


@contextmanager
def _even_experts(live: LiveBytes, case: Case) -> Iterator[None]:
    """Send equally many tokens to the experts of each rank: how many it would be, fake tensors do not tell."""
    if case.sizes.expert == 1:
        yield
        return
    from transformers.distributed.expert_parallel import AllToAllEP

    real = AllToAllEP._dispatch_tokens

    def dispatch(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Any:
        rows = -(-chosen.shape[0] // self.tp_mesh.size()) * chosen.shape[1]
        ranks = self.ep_mesh.size()
        sizes = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        with live.reading([*sizes, *sizes]):  # sent, and received
            return real(self, hidden, chosen, weights)

    AllToAllEP._dispatch_tokens = dispatch
    try:
        yield
    finally:
        AllToAllEP._dispatch_tokens = real


def _make_moments(weights: PolicyWeights, stepper: Stepper) -> None:
    """Take a first optimizer step, after which the moments exist."""
    for master in weights.trained.values():
        master.grad = torch.zeros_like(master)
    stepper.step(0.0, None)
    weights.drop_gradients()


def _train(
    live: LiveBytes, root: AnyRoot, weights: PolicyWeights, stepper: Stepper, one: Feed, case: Case
) -> None:  # fmt: skip
    """Take an optimizer step, as `Worker.train` does with a batch of one micro-batch."""
    with live.phase("forward"), torch.enable_grad():
        found = spread(one, root(one, case.outputs))
        objective = torch.stack([value.float().sum() for value in found.values() if value.requires_grad]).sum()
    with live.phase("backward"):
        torch.autograd.backward(objective * case.sizes.data)
    del one, found, objective
    with live.phase("optimizer"):
        weights.complete_gradients()
        weights.square_of_norm()
        stepper.step(2.0, 1.0)
    weights.drop_gradients()


def _build(
    case: Case, config: Fsdp2Config, ranks: Ranks, trained: bool
) -> tuple[AnyRoot, Adapters | None]:  # fmt: skip
    """Return the module on the meta device, sharded, with the shortcuts that `loading.prepare` would choose, and its
    adapters.
    """
    low, lora = case.model.dtype == "bfloat16", computed(config.lora, trained)
    mastered = (trained and lora is None) or not low
    model = _model(case, config.head, torch.float32 if mastered else torch.bfloat16)
    if case.device == "cpu":
        _hasten_norms(model)  # before FSDP2 changes their classes, which cannot be copied
    if ranks.size > 1:
        with sharding(ranks, low and mastered, keep=not config.reshard_after_forward) as wanted:
            wanted, _, mesh = type(model).prepare_distribute_model(wanted)
            model = type(model).maybe_distribute_model(model, wanted, mesh)
    model.tie_weights()
    adapters = None if lora is None else Adapters(model, attrs.evolve(lora, adapter=""), 0, config.head)
    root: AnyRoot = ValueRoot(model) if config.head == "value" else Root(model, config.logprob_chunk)
    if isinstance(root, Root):
        root.rule = logit_rules(model.config, config.head_dtype == "float32")[0]
    root.narrowed = narrow(model)
    if config.layout != "padded":
        _use_packed(model, config.layout, case.device == "gpu")
    if trained and config.gradient_checkpointing:
        enable_checkpointing(model, config.gradient_checkpointing)
    if not trained:
        model.requires_grad_(False)
    return root, adapters


def _model(case: Case, head: str, dtype: torch.dtype) -> Any:
    kind = transformers.AutoModelForSequenceClassification if head == "value" else transformers.AutoModelForCausalLM
    values = dict(case.model.config)
    if case.model.trust_remote_code and "auto_map" in values:
        settings = transformers.AutoConfig.from_pretrained(case.model.path, trust_remote_code=True)
        settings.update({key: value for key, value in values.items() if key != "auto_map"})
    else:
        settings = transformers.AutoConfig.for_model(**values)
    if head == "value":
        settings.num_labels = 1
    # Tied weights cannot be sharded. `from_pretrained` ties them afterwards, too.
    with torch.device("meta"), init.no_tie_weights():
        model = kind.from_config(settings, dtype=dtype, trust_remote_code=case.model.trust_remote_code)
    return model.eval()


def _allocate(model: nn.Module) -> None:
    """Allocate parameters and buffers: their storages are counted and hold nothing."""
    made = dict[int, nn.Parameter]()  # a tied weight once
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.ones(buffer.shape, dtype=buffer.dtype)
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                whole = torch.empty_like(parameter, device=CPU)
                made[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]


def _use_packed(model: Any, wanted: str, gpu: bool) -> None:
    """Switch to packed attention as `loading.prepare` does, for the attention of CPUs or of GPUs."""
    if gpu:
        transformers.AttentionInterface.register(ROWS, _rows_attention)
    try:
        model.set_attn_implementation(ROWS if gpu else attention.NAME)
    except ValueError:
        if wanted != "auto":
            raise


def _rows_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None,
    dropout: float = 0.0, *, whet_plan: Any, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return what `attention.packed_attention` computes on a GPU."""
    attention.refuse_unsupported(module, query, value, mask, dropout, more)
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    kernel = varlen.of_torch()[0] if query.dtype in varlen.HALVES else None
    attend = partial(attention.attend_elsewhere, plan=whet_plan, scale=scale, window=None, kernel=kernel)
    return attention.over_tokens(whet_plan, attend, query, key, value), None


def _hasten_norms(model: nn.Module) -> None:
    """Replace the norms that `hasten_norms` would replace. A copy with numbers is compared, for these have none."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(module).__name__.endswith("RMSNorm") and isinstance(weight, nn.Parameter):
            twin = copy.copy(module)
            twin._parameters = {"weight": nn.Parameter(torch.linspace(0.5, 1.5, weight.numel()))}
            if norms.hasten_norms(twin):
                module.forward = norms.Hastened(module, module.forward)


def _batch(case: Case) -> Batch:
    """Return sequences up to the longest that fill one pass, every token of them a target."""
    tokens = case.tokens
    lengths = [case.longest or tokens] * (tokens // (case.longest or tokens))
    rest = tokens - sum(lengths)
    vocabulary = int(case.model.vocab_size or 1)
    rows = []
    for length in (*lengths, *[rest] * bool(rest)):
        row = np.arange(length + 1) % vocabulary  # the last token is a target alone
        rows.append({"tokens": row, "loss_mask": np.arange(length + 1) >= 1})
    batch = from_sequences(rows, prompt_lengths=[1] * len(rows))
    ids = np.zeros((batch.tokens, case.topk), np.int64)
    return batch.with_columns(topk_ids=ids) if "logprobs_at" in case.outputs else batch
