"""Load a model for decoding, choose its decoder, and copy new weights into it."""

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from whet.errors import WeightSyncError, WhetError
from whet_hf.decode import Decoder
from whet_hf.fused import FusedDecoder, unsupported
from whet_hf.plain import PlainDecoder
from whet_ops.routing import Routers, find_routers, problem_of
from whet_weights.stored_names import Piece, StoredNames

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference between a decoder's logits and the model's own, relative to the largest logit."""


def load_model(path: str, dtype: str, device: str, trust_remote_code: bool) -> Any:
    """Return a causal language model for inference. Raises `WhetError` if weights are missing."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    missing = sorted(report["missing_keys"])
    if missing:  # transformers makes these up
        raise WhetError(
            f"model.path: the weights in {path} lack {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}; "
            "is the download complete, and is config.json that of these weights?"
        )
    return model.to(device).eval().requires_grad_(False)


def choose_decoder(
    model: Any, *, fused: bool, movable: bool = True, experts: bool = False, cache_bytes: int = 0
) -> Decoder:
    """Return the fastest decoder whose logits equal the model's own on random tokens.

    movable: the weights may move to other memory.
    cache_bytes: memory within which a decoder may keep ended sequences; see `FusedDecoder`.
    experts: the decoder must record the experts of each token.

    Raises `WhetError` if no decoder's logits do, or if the experts of this model cannot be recorded.
    """
    routers = _routers(model) if experts else None
    if fused and routers is None:
        reason = unsupported(model.config)
        if not reason:
            decoder = FusedDecoder(model, cache_bytes, movable=movable)
            difference = decoding_error(decoder, model)
            if difference <= TOLERANCE[model.dtype]:
                return decoder
            reason = f"this model: its logits differ by {difference:.1e} of the largest"
        log.warning("the fused decoder does not do %s; the model's own code decodes, which is slower", reason)
    plain = PlainDecoder(model, routers)
    try:
        difference = decoding_error(plain, model)
    except (WhetError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's own code raises anything
        raise WhetError(
            f"{type(model).__name__} cannot be decoded token by token with a cache of transformers: "
            f"{type(error).__name__}: {error}; use another generator for this model, e.g. vllm or sglang"
        ) from error
    if math.isnan(difference):
        raise WhetError(
            f"{type(model).__name__} gives logits that are not finite: its weights have diverged or are broken"
        )
    if difference > TOLERANCE[model.dtype]:
        raise WhetError(
            f"{type(model).__name__} gives other logits with a cache than without, by {difference:.1e} of the largest, "
            "so it cannot be sampled from token by token; use another generator for this model, e.g. vllm or sglang"
        )
    if cache_bytes:
        log.warning("the model's own code keeps no ended sequences, so generator.prefix_caching does nothing")
    return plain


def _routers(model: Any) -> Routers:
    routers = find_routers(model)
    few = torch.arange(2, 9, device=model.device)[None]
    problem = problem_of(routers, model, lambda: model.base_model(input_ids=few, use_cache=False))
    if problem:
        raise WhetError(f"the generator cannot record experts: {problem}; leave out backend.experts.record and replay")
    return routers


@torch.inference_mode()
def decoding_error(decoder: Decoder, model: Any) -> float:
    """Return the largest difference between decoding and full forward passes, relative to the largest logit.

    Random prompts of two lengths are decoded. NaN: some logit is not finite.
    """
    # An error of a state adds up over the tokens, so a few do not show it.
    count = 16 if isinstance(decoder, PlainDecoder) and decoder.cache_bytes[1] else 3
    draw = torch.Generator().manual_seed(0)
    short, long = (torch.randint(decoder.vocab_size, (n,), generator=draw).to(model.device) for n in (5, 9))
    new = torch.randint(decoder.vocab_size, (3, count), generator=draw).to(model.device)
    owner = torch.tensor([0, 1, 1], device=model.device)
    session = decoder.begin([short, long], owner, room=new.shape[1] + 1)
    found = [session.logits]
    for step in range(new.shape[1]):
        session.step(new[:, step])
        found.append(session.logits)
    steps, whole = [], []
    for row, prompt in enumerate((short, long, long)):
        tokens = torch.cat([prompt, new[row]])[None]
        whole.append(model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 :])
        steps.append(torch.stack([logits[row] for logits in found]))
    expected = torch.cat(whole)
    return float((torch.cat(steps) - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def take_weights(model: Any, weights: Iterable[tuple[str, Tensor]], stored: StoredNames | None = None) -> None:
    """Copy new weights into the model. Raises `WeightSyncError` if a parameter is missing or a name comes twice.

    Names are those of the model folder or those in memory. For tied parameters one of the names is enough. After an
    error the weights are a mixture and must not be used. `stored`: the model's stored names, if they are known already.
    """
    stored = StoredNames(model) if stored is None else stored
    targets = _targets(model, stored)
    wanted = {
        id(parameter): {piece.name for piece in stored.pieces(name)} or {name}
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    seen: set[str] = set()
    for name, tensor in weights:
        target = targets.get(name)
        if target is None:
            raise WeightSyncError(f"{type(model).__name__} has no parameter {name}, but it was sent")
        if name in seen:
            raise WeightSyncError(f"{name} was sent twice")
        if target.shape != tensor.shape:
            raise WeightSyncError(f"{name} was sent with shape {tuple(tensor.shape)}, wanted {tuple(target.shape)}")
        with torch.no_grad():
            target.write(tensor)
        seen.add(name)
        left = wanted.get(id(target.tensor), set())
        left.discard(name)
        if not left or target.piece is None:
            wanted.pop(id(target.tensor), None)
    if wanted:
        names = sorted(name for left in wanted.values() for name in left)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise WeightSyncError(f"{len(names)} parameters were not sent: {', '.join(names[:5])}{more}")


@frozen(eq=False)
class _Target:
    """The place of a tensor that may be sent: a whole tensor of the model, or a piece of one."""

    tensor: Tensor
    piece: Piece | None = None

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape if self.piece is None else torch.Size(self.piece.shape)

    def write(self, value: Tensor) -> None:
        if self.piece is None:
            self.tensor.copy_(value)
        else:
            self.piece.write(self.tensor, value)


def _targets(model: Any, stored: StoredNames) -> dict[str, _Target]:
    """Return the places of all tensors that may be sent, by their names in memory and by their stored names."""
    held = {**model.state_dict(keep_vars=True), **dict(model.named_parameters(remove_duplicate=False))}
    whole = {name: _Target(tensor) for name, tensor in held.items()}
    return whole | {p.name: _Target(tensor, p) for name, tensor in held.items() for p in stored.pieces(name)}
