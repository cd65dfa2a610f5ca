"""Load a Hugging Face causal model from a folder, and find out what it can do before it trains."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from attrs import evolve

from whet.data.batch import Batch, from_sequences
from whet.errors import ConfigError, WhetError
from whet.model import ModelInfo
from whet_fsdp2 import attention
from whet_fsdp2.feed import Feed, Root, feed, spread
from whet_fsdp2.layout import Layout
from whet_fsdp2.norms import hasten_norms

log = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Largest difference of logprobs between two ways that must agree, relative to their size."""


def load_model(info: ModelInfo) -> Any:
    """Load float32 weights from a local folder. Raises `WhetError` where weights are missing, odd or damaged."""
    from transformers import AutoModelForCausalLM

    try:
        with no_progress_bars():
            model, report = AutoModelForCausalLM.from_pretrained(
                info.path,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=info.trust_remote_code,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported, and refused below with their names
                output_loading_info=True,
            )
    except Exception as error:  # safetensors, transformers and remote code each raise their own
        raise WhetError(f"model.path: the model in {info.path} cannot be loaded: {error}") from error
    _refuse_incomplete(info.path, report)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model.eval()


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep the progress bars of transformers out of a worker's log."""
    from transformers.utils import logging as their_logging

    shown = their_logging.is_progress_bar_enabled()
    their_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            their_logging.enable_progress_bar()


def enable_checkpointing(model: Any) -> None:
    """Let layers keep only their inputs for the backward pass. There is no dropout, so no random state to keep."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False, "preserve_rng_state": False})
    except ValueError as error:
        raise ConfigError(f"backend.gradient_checkpointing: {error}") from error
    model.train()


def _refuse_incomplete(path: str, report: Any) -> None:
    for kind, words in (
        ("missing_keys", "lack"),
        ("mismatched_keys", "hold in another shape"),
        ("error_msgs", "cannot give"),
    ):
        found = report.get(kind) or ()
        names = sorted(str(item[0]) if isinstance(item, tuple) else str(item) for item in found)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise WhetError(
                f"model.path: the weights in {path} {words} {', '.join(names[:3])}{more}; "
                "is the download complete, and is config.json that of these weights?"
            )


def prepare(model: Any, wanted: str, chunk: int, longest: int) -> tuple[Root, Layout]:
    """Check that the model's logprobs can be computed here, and choose the layout for sequences up to `longest`.

    Tries every shortcut on a few tokens against the model's own logits. Raises `ConfigError` where the head is
    more than a matrix, or a layout that was asked for by name is not exact for this model.
    """
    root = Root(model, chunk)
    batch = _probe(model)
    with torch.no_grad():
        expected = _plain_logprobs(model, batch)
        hasten_norms(model)
        _check_head(root, batch, expected)
        if wanted == "padded":
            return root, "padded"
        layout: Layout = "packed" if wanted == "packed" else "shared"
        problem = _try_packed(root, batch, layout, longest, expected)
    if problem is None:
        return root, layout
    if wanted != "auto":
        raise ConfigError(
            f"backend.layout: {wanted!r} does not work for {type(model).__name__}: {problem}; use `layout: padded`"
        )
    log.warning("layout: padded, because packed rows do not work for %s: %s", type(model).__name__, problem)
    return root, "padded"


def _probe(model: Any) -> Batch:
    """Make three short sequences, two of which share a prompt."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    draw = np.random.Generator(np.random.Philox(0))
    prompt = draw.integers(vocabulary, size=5)
    rows = [np.concatenate([prompt, draw.integers(vocabulary, size=n)]) for n in (6, 3)]
    rows.append(draw.integers(vocabulary, size=9))
    masks = [np.arange(len(row)) >= 5 for row in rows]
    return from_sequences(
        [{"tokens": row, "loss_mask": mask} for row, mask in zip(rows, masks, strict=True)],
        prompt_lengths=[5, 5, 5],
        group=[0, 0, 1],
    )


def _plain_logprobs(model: Any, batch: Batch) -> np.ndarray[Any, Any]:
    """Compute logprobs [N] from the model's own logits, a sequence at a time."""
    device = model.get_input_embeddings().weight.device
    found = []
    for one in range(batch.sequences):
        part = batch.take([one])
        tokens = torch.from_numpy(part["tokens"]).to(device)
        logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0].float()
        logprobs = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0].cpu().numpy()
        found.append(np.concatenate([np.zeros(1, np.float32), logprobs]) * part["loss_mask"])
    return np.concatenate(found)


def _logprobs(root: Root, one: Feed) -> np.ndarray[Any, Any]:
    return spread(one, root(one, ("logprobs",)))["logprobs"].cpu().numpy()


def _device(root: Root) -> torch.device:
    return torch.device(root.model.get_input_embeddings().weight.device)


def _differ(found: Any, expected: Any) -> float:
    return float(np.abs(found - expected).max() / max(1.0, float(np.abs(expected).max())))


def _check_head(root: Root, batch: Batch, expected: Any) -> None:
    off = _differ(_logprobs(root, feed(batch, "padded", _device(root))), expected)
    if not off <= TOLERANCE:
        raise ConfigError(
            f"model.path: {type(root.model).__name__} does more than multiply by its head's matrix (its logprobs "
            f"differ by {off:.2g}); logit scaling and soft-capping are not supported by this backend yet"
        )


def _try_packed(root: Root, batch: Batch, layout: Layout, longest: int, expected: Any) -> str | None:
    """Switch to packed attention. Gives what stands in its way, and then switches back."""
    attention.register()
    before = root.model.config._attn_implementation
    try:
        root.model.set_attn_implementation(attention.NAME)
        one = feed(batch, layout, _device(root))
        plan = evolve(one.arguments["whet_plan"], reach=longest)
        off = _differ(_logprobs(root, evolve(one, arguments={**one.arguments, "whet_plan": plan})), expected)
        problem = None if off <= TOLERANCE else f"its logprobs differ by {off:.2g} from those of padded rows"
    except attention.UnsupportedAttentionError as error:
        problem = error.reason
    except (TypeError, ValueError, RuntimeError, KeyError) as error:  # from the model's own code
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        root.model.set_attn_implementation(before)
    return problem
