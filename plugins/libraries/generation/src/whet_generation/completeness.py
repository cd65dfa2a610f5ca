"""Checks of an engine's output: which weights made which token, and whether its logprobs can be trained on; and what is
reported of a running completion.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from whet.data.records import Completion, FloatArray, Progress, Request
from whet.errors import WeightSyncError, WhetError


def version_spans(found: Iterable[tuple[int, str]], count: int, wanted: str) -> tuple[tuple[int, int], ...]:
    """Return an engine's spans (first token, label of its weights) of `count` tokens as the `versions` of a completion.

    The label `default` stands for the weights that the engine loaded, any other is a version number. Raises `WhetError`
    if there is no label; `wanted` names what produces labels.
    """
    if not count:
        return ()
    versions = [(start, 0 if label == "default" else int(label)) for start, label in found if start < count]
    if not versions:
        raise WhetError(f"the engine says of no token which weights made it; wanted {wanted}")
    return tuple(v for i, v in enumerate(versions) if i == 0 or v[1] != versions[i - 1][1])


def refuse_mixture(id_: str, *, spoilt: bool) -> None:
    """Raise `WeightSyncError` if a weight sync that failed half way spoilt the weights while a request ran."""
    if spoilt:
        raise WeightSyncError(
            f"request {id_}: a weight sync failed while it ran, and a mixture of weights may have made its last "
            "tokens; the error of the weight sync says why"
        )


def checked_logprobs(found: FloatArray, request: Request, engine: str) -> FloatArray:
    """Return logprobs [L] with values above 0 set to 0. Raises `WhetError` if one is not finite."""
    if not np.isfinite(found).all():
        raise WhetError(
            f"request {request.id}: {engine} gave logprobs that are not finite; the weights may have diverged: look at "
            "grad_norm and lower the learning rate"
        )
    # By rounding, the logprob of a nearly certain token may be slightly above 0.
    return np.minimum(found, np.float32(0))


def one_token(
    id_: str, begin: int, token: int, logprob: float, likeliest: Sequence[int] = (), logprobs: Sequence[float] = ()
) -> Progress:
    """Return the report of one token. `likeliest` and their `logprobs`: the likeliest tokens at its position, [k]."""
    return Progress(
        id_, begin, np.array([token], np.int64), np.array([logprob], np.float32), np.array([likeliest], np.int64),
        np.array([logprobs], np.float32),
    )  # fmt: skip


def nothing_yet(id_: str) -> Completion:
    """Return the completion of a request that was aborted before it began."""
    return Completion(id_, np.zeros(0, np.int64), np.zeros(0, np.float32), "abort", ())
