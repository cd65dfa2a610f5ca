"""Tools: whether the model's chat template knows them, and the calls in what the model answers."""

from hashlib import blake2b
from typing import TYPE_CHECKING

from attrs import evolve

from whet.data.records import Completion, IntArray
from whet.endpoint.asked import Asked, shown
from whet.endpoint.refused import Refused
from whet.endpoint.told import Answer
from whet.errors import DataError

if TYPE_CHECKING:
    from whet.rollout.episode import Chat


def check_tools(asked: Asked, chat: "Chat") -> None:
    """Raise `Refused` where a request has tools, or calls of them, that the chat template does not know."""
    if not isinstance(asked.prompt, tuple) or not (asked.tools or any(message.calls for message in asked.prompt)):
        return
    try:
        chat.call_format  # noqa: B018 - it is found out at the first look
    except DataError as error:
        raise Refused(400, str(error), "tools" if asked.tools else "messages") from error


def answered(asked: Asked, chat: "Chat", prompt: IntArray, completion: Completion) -> Answer:
    """Read an answer to a request, as it is to be shown."""
    text = shown(chat.decode(completion.tokens), asked.stops)
    if not asked.reads_calls:
        return Answer(prompt, completion, text)
    written = chat.call_format
    raw = shown(chat.decode(completion.tokens, skip_special=not written.special), asked.stops)
    said, calls = written.read(raw)
    if not calls:
        return Answer(prompt, completion, text)
    # Derived, not drawn: where a template shows ids, an episode that is played again has the same tokens.
    seed = blake2b(prompt.tobytes() + completion.tokens.tobytes(), digest_size=8).digest()
    return Answer(prompt, completion, said, tuple(evolve(call, id=_id(seed, i)) for i, call in enumerate(calls)))


def _id(seed: bytes, number: int) -> str:
    """Make a call's id: nine letters and digits, for some templates take no others."""
    return blake2b(seed, digest_size=5, salt=number.to_bytes(8)).hexdigest()[:9]
