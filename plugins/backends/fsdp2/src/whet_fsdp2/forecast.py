"""Closed formulas for the peaks of a rank, and what can be changed to lower them. Imports no torch.

The formulas serve where a trace is not worth its seconds, or not possible. They count per token and layer, with hidden
size H, feed-forward size I, bytes b of a number in the forward pass (fitted to traces of Qwen2, Qwen3 and Llama):

    without checkpointing   2 b (4 I + 11 H) / 2 ...... kept from the forward pass to the backward pass
    selective               b (2 I + 6 H)               and the whole of one layer, twice: values and gradients
    with checkpointing      b H                         the same
"""

from attrs import evolve

from whet.component import MemoryTerm
from whet.config.structure import structure
from whet.data.model_info import ModelInfo
from whet_fsdp2.config import Fsdp2Config, headed, memory
from whet_memory.case import Case, Peak, Peaks, Saving

CHUNK_BYTES = 128 << 20
"""See `whet_ops.logprobs`, which imports torch."""
BUCKET_BYTES = 256 << 20
"""See `whet_weights.bucket_stream`."""
LORA_RANK = 16
"""The rank of an adapter that is offered in place of full training."""


def formulas(case: Case) -> Peaks:
    """Return the peaks of each phase."""
    config, model = structure(dict(case.settings), Fsdp2Config, None), case.model
    ranks, gpu = case.sizes.ranks, case.device == "gpu"
    terms = list(memory(config, model, ranks, case.trained))
    held = sum(term.bytes for term in terms if _is_held(term, gpu))
    passing = sum(term.bytes for term in terms if "gathered" in term.what)
    gradients = sum(term.bytes for term in terms if term.what.startswith("gradients"))
    idle = held - passing - gradients
    loaded = [term for term in terms if term.when == "loading"]
    device = sum(term.bytes for term in loaded if term.place == "gpu")  # a CPU holds as much, mapped from a file or not
    host = sum(term.bytes for term in loaded if term.place == "host") if gpu else 0
    head = _head(case, config)
    asleep = idle if gpu else 0
    peaks: dict[str, Peak] = {
        "loading": Peak(device, host),
        "idle": Peak(idle),
        "weight_sync": Peak(idle + _largest(model) * (ranks > 1) + BUCKET_BYTES * gpu),
        "asleep": Peak(0, asleep),
    }
    if case.trained:
        peaks["train"] = Peak(held + max(head, activations(case, config)))
        peaks["optimizer"] = Peak(idle + gradients + _brought(case, terms))
    else:
        peaks["score"] = Peak(idle + passing + max(head, _layer(case, kept=False)))
    return peaks  # type: ignore[return-value]  # the keys are phases


def _largest(model: ModelInfo) -> int:
    """Return the bytes of the largest tensor as it computes: the embedding, or gate and up of a layer's experts."""
    number, one = 2 if model.dtype == "bfloat16" else 4, _count(model, "intermediate_size")
    rows = max(model.vocab_size, 2 * model.experts * _count(model, "moe_intermediate_size", one))
    return number * rows * _count(model, "hidden_size")


def activations(case: Case, config: Fsdp2Config) -> int:
    """Return the bytes of activations at the most, over all layers."""
    layers, number = _count(case.model, "num_hidden_layers"), 2 if case.model.dtype == "bfloat16" else 4
    if not config.gradient_checkpointing:
        return layers * _layer(case, kept=True)
    hidden = _count(case.model, "hidden_size")
    kept = (
        (2 * _mlp_size(case.model) + 5 * hidden) // case.sizes.tensor
        if config.gradient_checkpointing == "selective"
        else 0
    )
    return layers * number * case.tokens // case.sizes.context * (hidden + kept) + 2 * _layer(case, kept=True)


def _layer(case: Case, kept: bool) -> int:
    """Return the bytes of one layer's activations: those that the backward pass needs, or those of a moment."""
    number = 2 if case.model.dtype == "bfloat16" else 4
    hidden, tensor = _count(case.model, "hidden_size"), case.sizes.tensor  # norms and residuals are not split by it
    per_token = 6 * hidden + (4 * _mlp_size(case.model) + 5 * hidden) // tensor
    per_token += 2 * hidden * _count(case.model, "num_experts_per_tok")  # a copy for each chosen expert, and its output
    return case.tokens // case.sizes.context * number * (per_token if kept else per_token // 2)


def _head(case: Case, config: Fsdp2Config) -> int:
    """Return the bytes of the logits of one chunk, forward and backward, and of the head's gradient."""
    if config.head == "value":
        return 0
    vocabulary = case.model.vocab_size
    chunk = min(case.tokens, config.logprob_chunk or max(1, CHUNK_BYTES // (4 * max(1, vocabulary))))
    gradient = 4 * vocabulary * _count(case.model, "hidden_size") if case.trained and config.lora is None else 0
    return (3 * 4 * chunk * vocabulary + gradient) // case.sizes.tensor


def _is_held(term: MemoryTerm, gpu: bool) -> bool:
    return term.when == "working" and (term.place == "" or (gpu and term.place == "gpu"))


def not_held(case: Case) -> tuple[int, int]:
    """Return the bytes by which the optimizer's state on the device is less than AdamW's in float32, and what a step
    brings there for a while.
    """
    config = structure(dict(case.settings), Fsdp2Config, None)
    if not case.trained or config.lora is not None:
        return 0, 0
    if case.device == "cpu":
        config = evolve(config, offload_optimizer=False)  # the host's memory is the device's
    terms = [list(memory(one, case.model, case.sizes.ranks, True)) for one in (with_adamw(config), config)]
    plain, own = (sum(term.bytes for term in found if _is_held(term, case.device == "gpu")) for found in terms)
    return plain - own, _brought(case, terms[1])


def with_adamw(config: Fsdp2Config) -> Fsdp2Config:
    """Return the config with moments in float32 on the device, as a trace computes them."""
    optimizer = config.optimizer
    kind = "adamw" if optimizer.kind == "adamw_8bit" else optimizer.kind
    return evolve(config, offload_optimizer=False, optimizer=evolve(optimizer, kind=kind))


def _brought(case: Case, terms: list[MemoryTerm]) -> int:
    """Return the bytes of the largest part of the state in host memory that a step brings to the device."""
    away = sum(term.bytes for term in terms if term.place == "host" and term.when == "working")
    shards = max(1, case.sizes.shards * case.sizes.tensor)
    largest = max(BUCKET_BYTES // 4, case.model.vocab_size * _count(case.model, "hidden_size") // shards)
    whole = headed(structure(dict(case.settings), Fsdp2Config, None), case.model).parameters
    return min(away, away * largest * shards // max(1, whole))


def savings(case: Case) -> tuple[Saving, ...]:
    """Return the changes of this section that can lower the peak, the cheapest first."""
    config = structure(dict(case.settings), Fsdp2Config, None)
    found = []
    if case.trained and not config.reshard_after_forward and case.sizes.shards > 1:
        found.append(Saving("reshard_after_forward", True, "each layer is gathered once more"))
    if case.trained and not config.gradient_checkpointing:
        found.append(Saving("gradient_checkpointing", "selective", "norms and activations are computed again"))
    if case.trained and config.gradient_checkpointing is not True:
        found.append(Saving("gradient_checkpointing", True, "a third more time of each training step"))
    if case.trained and case.device == "gpu" and not config.offload_optimizer and config.lora is None:
        found.append(Saving("offload_optimizer", True, "each step copies its state from the host and back"))
    least = max(512, case.longest if case.longest < case.tokens else 0)
    if (half := config.micro_batch_tokens // 2) >= least:
        found.append(Saving("micro_batch_tokens", half, "smaller passes, which use a device less well"))
    if (quarter := config.micro_batch_tokens // 4) >= least:
        found.append(Saving("micro_batch_tokens", quarter, "smaller passes, which use a device less well"))
    default = max(1, CHUNK_BYTES // (4 * max(1, case.model.vocab_size)))
    if config.head == "lm" and (config.logprob_chunk or default) > 64:
        found.append(Saving("logprob_chunk", 64, "more and smaller products with the head"))
    if case.trained and config.lora is None:
        words = f"full training: an adapter of rank {LORA_RANK} is trained in place of all weights"
        found.append(Saving("lora.rank", LORA_RANK, words, other_result=True, new_run=True))
    return tuple(found)


def _count(model: ModelInfo, key: str, default: int = 0) -> int:
    """Return a number of the model's `config.json`; multimodal models have it under `text_config`."""
    inner = model.config.get("text_config")
    value = model.config.get(key, inner.get(key) if isinstance(inner, dict) else None)
    return value if isinstance(value, int) and value > 0 else default


def _mlp_size(model: ModelInfo) -> int:
    """Return the feed-forward values of a token in one layer, of all experts that see it."""
    chosen = _count(model, "num_experts_per_tok")
    own = _count(model, "intermediate_size", 4 * _count(model, "hidden_size"))
    return chosen * _count(model, "moe_intermediate_size", own) if chosen else own
