"""The part that runs in SGLang's own processes: hooks for seeds and stops, and the loader of weights.

SGLang calls `register` in each of its processes, as a plugin of SGLang (entry point `sglang.srt.plugins`), and `load`
with the data of `update_weights_from_tensor`. An engine that whet did not start is not changed. Without the hooks:

    seeds    SGLang uses seeds only with deterministic inference, whose kernels need a GPU and not every model has
    stops    SGLang stops at named tokens only if it also stops at the stop tokens of the model folder
    strings  SGLang searches a stop string in as many tokens as the encoded string has, which may be too few
"""

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from whet.errors import WeightSyncError, in_words
from whet.interfaces.weights import TransferSpec
from whet_sglang.arguments import SWITCH
from whet_sglang.drawing import draw
from whet_weights.whole import receive_whole, stored_shapes

log = logging.getLogger("sglang.whet")


def register() -> None:
    """Register the hooks in the SGLang of this process, if whet started the engine."""
    if os.environ.get(SWITCH) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in HOOKS.items():
        kind = HookType.AFTER if hook is with_seeds else HookType.AROUND
        HookRegistry.register(target, hook, kind)


def with_seeds(info: Any, *args: Any, **kwargs: Any) -> Any:
    """Put each request's seed into the sampling info of a batch. Returns the info."""
    batch = kwargs["batch"] if "batch" in kwargs else next(a for a in args if hasattr(a, "reqs"))
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device, non_blocking=True)
    return info


def sampled(
    original: Callable[..., Any], self: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, simple: bool
) -> Any:
    """Draw tokens by the seeds of their requests. With min-p or a sampling mask, SGLang's own sampler draws."""
    if info.sampling_seed is None or info.need_min_p_sampling or info.sampling_mask_batch_indices is not None:
        return original(self, probs, info, positions, simple)
    tokens = draw(probs, info.sampling_seed, positions, info.top_ks, info.top_ps, restricted=not simple)
    return tokens.to(torch.int32), None


def stopped(original: Callable[..., bool], self: Any, new_tokens: Sequence[int]) -> bool:
    """Return whether a request ends: only at the stop tokens that the request names."""
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

    named = self.sampling_params.stop_token_ids
    if not (self.sampling_params.ignore_eos and named):
        return original(self, new_tokens)
    for place, token in enumerate(new_tokens):
        if token in named:
            self.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            self.finished_len = len(self.output_ids) - len(new_tokens) + place + 1
            return True
    return False


def tail_length(original: Callable[..., int], self: Any, new_tokens: int) -> int:
    """Return how many tokens to search for a stop string: at least as many as the string has bytes."""
    most = max((len(stop.encode()) for stop in self.sampling_params.stop_strs), default=0)
    return max(original(self, new_tokens), min(most + new_tokens, len(self.output_ids)))


HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch": with_seeds,
    "sglang.srt.layers.sampler.Sampler._sample_from_probs": sampled,
    "sglang.srt.managers.schedule_batch.Req._check_token_based_finish": stopped,
    "sglang.srt.managers.schedule_batch.Req._stop_match_tail_len": tail_length,
}


def load(model: Any, named: Sequence[tuple[str, Any]]) -> None:
    """Receive a weight sync into the model of this process, and write a report.

    `named` is one pair. Its name is a JSON object: `spec` (the fields of `TransferSpec`), `receiver`, `folder` (of the
    model), `reports` (a folder). No error is raised, because SGLang would die of it. A report has `session`, `failure`
    (a message), and `spoilt`: whether the weights are a mixture.
    """
    from sglang.srt.runtime_context import get_parallel

    order = json.loads(named[0][0])
    report = {"session": order["spec"]["session"], "failure": "", "spoilt": False}
    try:
        _take(model, order, get_parallel().tp_rank, report)
    except Exception as error:
        log.exception("a weight sync failed")
        report["failure"] = in_words(error)
    file = Path(order["reports"]) / f"{get_parallel().tp_rank}.json"
    file.with_suffix(".tmp").write_text(json.dumps(report), encoding="utf-8")
    os.replace(file.with_suffix(".tmp"), file)


def _take(model: Any, order: dict[str, Any], share: int, report: dict[str, Any]) -> None:
    """Receive and load a whole weight sync."""
    tied, spec = bool(getattr(model.config, "tie_word_embeddings", False)), TransferSpec(**order["spec"])
    with torch.inference_mode(False):  # later weight syncs read what is mapped now
        arriving = receive_whole(spec, order["receiver"] + share, stored_shapes(order["folder"]), tied=tied)
    report["spoilt"] = True
    model.load_weights(arriving)
    for _ in arriving:  # the rest, so that the end of the weight sync is checked
        pass
    numbers = ((name, p) for name, p in model.named_parameters() if p.dtype.itemsize > 1)  # no operator looks at FP8
    if broken := next((name for name, p in numbers if not torch.isfinite(p).all()), ""):
        raise WeightSyncError(f"after the weights were loaded {broken} holds numbers that are not finite")
    report["spoilt"] = False
