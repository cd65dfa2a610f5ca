"""What driver and worker say to each other about an episode, and errors that keep their meaning across processes.

    driver                                  worker
    begin(number, task, ...)            ->  the environment runs; each message is sent when it is made
    [{do: reply, id: 1, ...}]           <-
    [{do: fork, ...}, {do: reward, ...}]    <-  also while a reply is under way
    answer(number, 1, {value: ...})     ->  the environment has its reply
    [{do: stop}], [{do: go}]            <-  the clock of the deadline stands still meanwhile
    [{do: reward, ...}, {do: end, ...}]     <-

`begin` is a stream, so the driver takes messages in the order in which the environment makes them, and as soon as it
would take them from an environment of its own. A reward or a fork names the reply that its sequence awaits: if the
reply has ended in the driver, the message belongs to the turn before it. A message with an `id` wants an answer:
`{"value": ...}`, or an error from `failure`. An empty list is a sign of life: the deadline of a stream is that of one
item, and a clock that is stopped in the driver may hold an episode up for longer.
"""

from collections.abc import Mapping
from typing import Any

from whet.errors import ContextFull, DataError, EpisodeError, InfrastructureError, Undecided, in_words, place_of
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
    again, origin = bool(getattr(error, "again", True)), f"{type(error).__qualname__} at {place_of(error)}"
    return {"kind": kind, "text": in_words(error), "again": again, "origin": origin}


def raised(told: Mapping[str, Any]) -> Exception:
    """Return the error that `failure` told."""
    kind, text = told["kind"], told["text"]
    if kind == "context":
        full = ContextFull(told["length"], 0)
        full.args = (text,)
        return full
    kinds = {"undecided": Undecided, "infrastructure": InfrastructureError, "data": DataError, "index": IndexError}
    error = kinds.get(kind, EpisodeError)(text)
    vars(error)["origin"] = told["origin"]  # its traceback is lost; see `whet.rollout.fail_fast`
    if isinstance(error, InfrastructureError):
        error.again = told["again"]
    return error
