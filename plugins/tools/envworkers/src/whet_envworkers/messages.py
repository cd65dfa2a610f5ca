"""What driver and worker say to each other about an episode, and errors that keep their meaning across processes.

    driver                                  worker
    begin(number, task, ...)            ->  the environment runs until it needs the driver
    [{do: reply, id: 1, ...}]           <-
    advance(number, [(1, answer)])      ->  it goes on
    [{do: reward, ...}, {do: end}]      <-

A message with an `id` wants an answer: `{"value": ...}`, or an error from `failure`. A call therefore takes as long as
the environment's own code, and not as long as the model.
"""

from collections.abc import Mapping
from typing import Any

from whet.errors import ContextFull, DataError, EpisodeError, InfrastructureError, Undecided, in_words
from whet.rollout.fail_fast import is_infrastructure

Message = dict[str, Any]


def failure(error: BaseException) -> Message:
    """Return an error as builtins."""
    if isinstance(error, ContextFull):
        return {"kind": "context", "text": str(error), "length": error.length}
    kind = (
        "undecided" if isinstance(error, Undecided)
        else "infrastructure" if is_infrastructure(error)
        else "data" if isinstance(error, DataError)
        else "index" if isinstance(error, IndexError)
        else "episode"
    )  # fmt: skip
    return {"kind": kind, "text": in_words(error), "again": bool(getattr(error, "again", True))}


def raised(told: Mapping[str, Any], where: str = "") -> Exception:
    """Return the error that `failure` told. `where` begins its message, except where the kind says enough."""
    kind, text = told["kind"], told["text"]
    if kind == "context":
        full = ContextFull(told["length"], 0)
        full.args = (text,)
        return full
    if kind == "index":
        return IndexError(text)
    kinds = {"undecided": Undecided, "infrastructure": InfrastructureError, "data": DataError}
    error = kinds.get(kind, EpisodeError)(f"{where}{text}")
    if isinstance(error, InfrastructureError):
        error.again = told["again"]
    return error
