"""What runs in SGLang's own processes: hooks that make it draw and stop as it is asked, and the loader of weights.

SGLang calls `register` in each of its processes, as a plugin of its own kind (entry point `sglang.srt.plugins`), and
`load` for what comes by `update_weights_from_tensor`. In an engine that is not whet's own nothing is changed.

    seeds    SGLang has them only where inference is deterministic, with kernels that no CPU and not every model has
    stops    it stops at tokens by name only where it also stops at those of the model folder
    strings  it looks for a stop string among as many tokens as that has when it is encoded, which may be too few
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
from whet.weights.whole import receive_whole, stored_shapes
from whet_sglang.arguments import SWITCH
from whet_sglang.drawing import draw

log = logging.getLogger("sglang.whet")


def register() -> None:
    """Hook into this process's SGLang."""
    if os.environ.get(SWITCH) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in HOOKS.items():
        kind = HookType.AFTER if hook is with_seeds else HookType.AROUND
        HookRegistry.register(target, hook, kind)


def with_seeds(info: Any, *args: Any, **kwargs: Any) -> Any:
    """Put each request's seed into what a batch is sampled with."""
    batch = kwargs["batch"] if "batch" in kwargs else next(a for a in args if hasattr(a, "reqs"))
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device, non_blocking=True)
    return info


def sampled(
    original: Callable[..., Any], self: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, simple: bool
) -> Any:
    """Draw tokens by their requests' seeds; SGLang's own way where more is asked of it than tokens."""
    if info.sampling_seed is None or info.need_min_p_sampling or info.sampling_mask_batch_indices is not None:
        return original(self, probs, info, positions, simple)
    tokens = draw(probs, info.sampling_seed, positions, info.top_ks, info.top_ps, restricted=not simple)
    return tokens.to(torch.int32), None


def stopped(original: Callable[..., bool], self: Any, new_tokens: Sequence[int]) -> bool:
    """End a request at the stop tokens that it names, and at no others."""
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
    """Look for a stop string among as many tokens as it has bytes."""
    most = max((len(stop.encode()) for stop in self.sampling_params.stop_strs), default=0)
    return max(original(self, new_tokens), min(most + new_tokens, len(self.output_ids)))


HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch": with_seeds,
    "sglang.srt.layers.sampler.Sampler._sample_from_probs": sampled,
    "sglang.srt.managers.schedule_batch.Req._check_token_based_finish": stopped,
    "sglang.srt.managers.schedule_batch.Req._stop_match_tail_len": tail_length,
}


def load(model: Any, named: Sequence[tuple[str, Any]]) -> None:
    """Take a hand-over into the model of this process, whole or not at all, and write a report.

    `named` is one pair, whose name says in JSON: `link` (the fields of `TransferSpec`), `receiver`, `folder` of
    the model, `reports`, a folder. Nothing is raised, of which SGLang would die. A report has `session`, `failure` in
    words, and `spoilt`: whether a mixture was left behind.
    """
    from sglang.srt.runtime_context import get_parallel

    order = json.loads(named[0][0])
    report = {"session": order["link"]["session"], "failure": "", "spoilt": False}
    try:
        _take(model, order, get_parallel().tp_rank, report)
    except Exception as error:
        log.exception("a hand-over of weights failed")
        report["failure"] = in_words(error)
    file = Path(order["reports"]) / f"{get_parallel().tp_rank}.json"
    file.with_suffix(".tmp").write_text(json.dumps(report), encoding="utf-8")
    os.replace(file.with_suffix(".tmp"), file)


def _take(model: Any, order: dict[str, Any], share: int, report: dict[str, Any]) -> None:
    """Load a whole hand-over."""
    tied, link = bool(getattr(model.config, "tie_word_embeddings", False)), TransferSpec(**order["link"])
    with torch.inference_mode(False):  # what is mapped now is read by later hand-overs
        arriving = receive_whole(link, order["receiver"] + share, stored_shapes(order["folder"]), tied=tied)
    report["spoilt"] = True
    model.load_weights(arriving)
    for _ in arriving:  # a loader that stops early would leave unsaid whether that was all
        pass
    if broken := next((name for name, p in model.named_parameters() if not torch.isfinite(p).all()), ""):
        raise WeightSyncError(f"after the weights were loaded {broken} holds numbers that are not finite")
    report["spoilt"] = False
