"""Conversion between whet's records and SGLang's: requests to sampling parameters, outputs to completions."""

import base64
from typing import Any

import numpy as np

from whet.data.records import Completion, Request, Stop
from whet.errors import WhetError
from whet_generation.completeness import checked_logprobs, version_spans
from whet_generation.routed_experts import COLUMN, completion_column

LOWEST_TEMPERATURE = 1e-5
"""At lower temperatures SGLang takes the likeliest token, with its logprob at temperature 1."""
STOPS: dict[str, Stop] = {"stop": "stop", "length": "length", "abort": "abort"}
BROKEN = "NaN happened"
"""SGLang's finish reason for a token outside the vocabulary, which it replaces by a stop token."""


def sampling_params(request: Request, limit: int) -> dict[str, Any]:
    """Return SGLang's sampling parameters. Only the request's stop conditions and the limit end a completion."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "sampling_seed": request.seed % 2**63,
        "max_new_tokens": limit,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_tokens),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }


def completion(request: Request, output: dict[str, Any], experts: tuple[int, int] | None = None) -> Completion:
    """Return the completion of SGLang's final output. Raises `WhetError` if the output is inconsistent.

    experts: the layers of the model and the experts of a token, if SGLang records the experts.
    """
    said, meta = f"request {request.id}: SGLang", output["meta_info"]
    reason = meta["finish_reason"] or {}
    if reason.get("type") not in STOPS or reason.get("matched") == BROKEN:
        raise WhetError(f"{said} ended it with {reason}")
    stop = STOPS[reason["type"]]
    sampled = meta.get("output_token_logprobs") or []
    # The logprobs of an aborted request may lack its last tokens.
    count = min(len(sampled), len(output["output_ids"])) if stop == "abort" else len(output["output_ids"])
    tokens = np.array(output["output_ids"][:count], np.int64)
    if [token for _, token, *_ in sampled[:count]] != tokens.tolist():
        raise WhetError(f"{said} gave logprobs of {len(sampled)} tokens that are not its {len(tokens)}")
    logprobs = np.array([logprob for logprob, *_ in sampled[:count]], np.float32)
    spans = version_spans(
        ((int(span["start"]), span["version"]) for span in meta.get("weight_versions") or ()), count,
        "SGLang 0.5.23 or later",
    )  # fmt: skip
    columns = {}
    if experts is not None:
        packed = np.frombuffer(base64.b64decode(meta.get("routed_experts") or ""), np.int32)
        # Of an aborted request, the last tokens may have no logprobs, and are left out.
        rows = packed.reshape(-1, *experts)[: len(request.tokens) + count]
        columns[COLUMN] = completion_column(rows, len(request.tokens), count, "SGLang")
    return Completion(request.id, tokens, checked_logprobs(logprobs, request, "SGLang"), stop, spans, columns)
