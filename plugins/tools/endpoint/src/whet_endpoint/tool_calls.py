"""Tools: whether the model's chat template supports them, and the calls in a response of the model."""

from hashlib import blake2b

from attrs import evolve

from whet.data.messages import Call
from whet.data.records import Completion, IntArray
from whet.errors import DataError
from whet.interfaces.chat import Chat
from whet_endpoint.call_format import call_format_of
from whet_endpoint.choices import Choice
from whet_endpoint.errors import ApiError
from whet_endpoint.reasoning import begins_inside, split
from whet_endpoint.requests import ApiRequest, shown


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
    plain = chat.decode(completion.tokens)
    text, calls = shown(plain, request.stops), tuple[Call, ...]()
    stop = next((stop for stop in request.stops if plain.startswith(stop, len(text))), "")
    if request.reads_calls:
        call_format = call_format_of(chat)
        raw = shown(chat.decode(completion.tokens, skip_special=not call_format.special), request.stops)
        before, calls = call_format.read(raw)
        text = before if calls else text
    reasoning, text = split(text, begins_inside(chat)) if request.splits_reasoning else ("", text)
    # Derived, not drawn: where a template shows ids, an episode that is played again has the same tokens.
    seed = blake2b(prompt.tobytes() + completion.tokens.tobytes(), digest_size=8).digest()
    named = tuple(evolve(call, id=_id(seed, i)) for i, call in enumerate(calls))
    return Choice(prompt, completion, text, named, reasoning, stop)


def _id(seed: bytes, number: int) -> str:
    """Return the id of a call: nine letters and digits, because some templates accept no others."""
    return blake2b(seed, digest_size=5, salt=number.to_bytes(8)).hexdigest()[:9]
