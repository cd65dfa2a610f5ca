"""Tools: whether the model's chat template supports them, and the calls in a response of the model."""

from whet.data.chat import with_ids
from whet.data.messages import Call
from whet.data.records import Completion, IntArray
from whet.errors import DataError
from whet.interfaces.chat import Chat
from whet_chat.response import response_format, tool_format
from whet_endpoint.choices import Choice
from whet_endpoint.errors import ApiError
from whet_endpoint.reasoning import CLOSE, begins_inside, split
from whet_endpoint.requests import ApiRequest, shown


def check_tools(request: ApiRequest, chat: Chat) -> None:
    """Raise `ApiError` where a request has tools, or calls of tools, that the chat template does not support."""
    if not isinstance(request.prompt, tuple):
        return
    if not request.tools and not any(message.calls for message in request.prompt):
        return
    try:
        tool_format(chat)
    except DataError as error:
        raise ApiError(400, str(error), "tools" if request.tools else "messages") from error


def read_choice(request: ApiRequest, chat: Chat, prompt: IntArray, completion: Completion) -> Choice:
    """Return a completion as it is shown: its text, and its calls where the request has them read."""
    plain = chat.decode(completion.tokens)
    text, calls, reasoning = shown(plain, request.stops), tuple[Call, ...](), ""
    stop = next((stop for stop in request.stops if plain.startswith(stop, len(text))), "")
    form, tools = response_format(chat), request.tools if request.reads_calls else ()
    written = shown(chat.message(completion.tokens).written, request.stops)
    if request.splits_reasoning and splits_itself(chat):
        said = form.read(written, tools)
        reasoning, text, calls = said.reasoning, without_special(chat, said.text), said.calls
    else:
        before, calls = form.before_calls(written, tools)
        text = without_special(chat, before) if calls else text
        reasoning, text = split(text, begins_inside(chat)) if request.splits_reasoning else ("", text)
    return Choice(prompt, completion, text, with_ids(calls, prompt, completion.tokens), reasoning, stop)


def splits_itself(chat: Chat) -> bool:
    """Return whether the template writes reasoning in another way than between `<think>` and `</think>`."""
    form = response_format(chat)
    return form.channels or (form.reasoning is not None and form.reasoning.close != CLOSE)


def without_special(chat: Chat, text: str) -> str:
    """Return text without the special tokens that are written in it."""
    return chat.decode(chat.encode(text))
