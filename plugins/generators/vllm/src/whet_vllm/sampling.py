"""Conversion between whet's records and vLLM's: requests to sampling parameters, outputs to completions."""

from typing import Any

import numpy as np

from whet.data.records import Completion, Progress, Request, Stop
from whet.errors import WhetError
from whet_generation.completeness import checked_logprobs, version_spans
from whet_generation.routed_experts import COLUMN, completion_column

LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this value, except 0."""
STOPS: dict[str, Stop] = {"stop": "stop", "length": "length", "abort": "abort"}


def sampling_params(request: Request, limit: int) -> Any:
    """Return vLLM's `SamplingParams`. Only the request's stop conditions and the limit end a completion."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    sampling = request.sampling
    kind = RequestOutputKind.FINAL_ONLY if request.progress is None else RequestOutputKind.CUMULATIVE
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=request.seed % 2**63,
        max_tokens=limit,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_tokens),
        ignore_eos=True,
        logprobs=request.progress or 0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        output_kind=kind,
        structured_outputs=StructuredOutputsParams(json=sampling.schema) if sampling.schema else None,
    )


def completion(request: Request, output: Any) -> Completion:
    """Return the completion of vLLM's final `RequestOutput`. Raises `WhetError` if the output is inconsistent."""
    (found,) = output.outputs
    if found.finish_reason not in STOPS:
        raise WhetError(f"request {request.id}: vLLM ended it with {found.finish_reason!r}: {found.stop_reason!r}")
    tokens = np.array(found.token_ids, np.int64)
    logprobs = sampled_logprobs(found.logprobs, len(tokens))
    spans = version_spans(
        ((int(span.start), span.version) for span in found.weight_versions or ()), len(tokens), "vLLM 0.32 or later"
    )
    experts = getattr(found, "routed_experts", None)
    column = None if experts is None else completion_column(experts, len(request.tokens), len(tokens), "vLLM")
    return Completion(
        request.id, tokens, checked_logprobs(logprobs, request, "vLLM"), STOPS[found.finish_reason], spans,
        {} if column is None else {COLUMN: column},
    )  # fmt: skip


def progress(request: Request, output: Any, begin: int) -> Progress:
    """Return the tokens of vLLM's running `RequestOutput` from the token `begin` on."""
    (found,) = output.outputs
    count, k, flat = len(found.token_ids), request.progress or 0, found.logprobs
    likeliest = [range(start + 1, start + 1 + k) for start in flat.start_indices[begin:count]]
    return Progress(
        request.id,
        begin,
        np.array(found.token_ids[begin:], np.int64),
        sampled_logprobs(flat, count, begin),
        np.array([[flat.token_ids[i] for i in at] for at in likeliest], np.int64).reshape(len(likeliest), k),
        np.array([[flat.logprobs[i] for i in at] for at in likeliest], np.float32).reshape(len(likeliest), k),
    )


def sampled_logprobs(flat: Any, count: int, begin: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the logprobs of the sampled tokens from `begin` to `count`: the first entry at each position of vLLM's
    `FlatLogprobs`.
    """
    if begin == count:
        return np.zeros(0, np.float32)
    starts = flat.start_indices[begin:count]
    found = np.array([flat.logprobs[start] for start in starts], np.float32)
    if len(found) != count - begin:
        raise WhetError(f"vLLM gave logprobs of {begin + len(found)} of {count} tokens")
    return found
