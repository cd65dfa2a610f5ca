"""Tools: whether the model's chat template supports them, and the calls in a response of the model."""

from hashlib import blake2b

from attrs import evolve

from whet.data.records import Completion, IntArray
from whet.errors import DataError
from whet.interfaces.chat import Chat
from whet_endpoint.call_format import call_format_of
from whet_endpoint.errors import ApiError
from whet_endpoint.requests import ApiRequest, shown
from whet_endpoint.responses import Choice


def check_tools(request: ApiRequest, chat: Chat) -> None:
    """Raise `ApiError` where a request has tools, or calls of tools, that the chat template does not support."""
    if not isinstance(request.prompt, tuple):
        return
    if not request.tools and not any(message.calls for message in request.prompt):
        return
    try:
        call_format_of(chat)
    except DataError as error:
        raise ApiError(400, str(error), "tools" if request.tools else "messages") from error


def read_choice(request: ApiRequest, chat: Chat, prompt: IntArray, completion: Completion) -> Choice:
    """Return a completion as it is shown: its text, and its calls where the request has them read."""
    text = shown(chat.decode(completion.tokens), request.stops)
    if not request.reads_calls:
        return Choice(prompt, completion, text)
    call_format = call_format_of(chat)
    raw = shown(chat.decode(completion.tokens, skip_special=not call_format.special), request.stops)
    before, calls = call_format.read(raw)
    if not calls:
        return Choice(prompt, completion, text)
    # Derived, not drawn: where a template shows ids, an episode that is played again has the same tokens.
    seed = blake2b(prompt.tobytes() + completion.tokens.tobytes(), digest_size=8).digest()
    return Choice(prompt, completion, before, tuple(evolve(call, id=_id(seed, i)) for i, call in enumerate(calls)))


def _id(seed: bytes, number: int) -> str:
    """Return the id of a call: nine letters and digits, because some templates accept no others."""
    return blake2b(seed, digest_size=5, salt=number.to_bytes(8)).hexdigest()[:9]
