"""Items of the Responses dialect: a list of messages, calls, results of calls and reasoning, as core's messages.

    message (user, system, developer)      a message
    reasoning, message, function_call      one message of the assistant, in this order, as far as they are there
    function_call_output                   a message of the role `tool`

Fields that an item has beside these, such as token ids, are not read: the recorded tokens are found by the messages.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from attrs import define, evolve, field

from whet.data.messages import Call, Conversation, Message, conversation
from whet.errors import DataError
from whet.interfaces.chat import Chat
from whet_endpoint.choices import Choice, tokens_of
from whet_endpoint.errors import ApiError, unwanted
from whet_endpoint.messages import is_text, read_call
from whet_endpoint.requests import ApiRequest

TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
"""Types of parts that are text."""


def read_items(value: Any) -> Conversation:
    """Return the messages of the items of a request. Raises `ApiError`."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise unwanted("input", value, "text or a list of items")
    try:
        messages = tuple(_messages(value))
    except DataError as error:
        raise ApiError(400, str(error), "input") from error
    if not all(is_text(message.text + message.reasoning) for message in messages):
        raise ApiError(400, "an item has half a character (a lone surrogate)", "input")
    return messages


@define
class _Assistant:
    """A message of the assistant, put together from items."""

    reasoning: list[str] = field(factory=list)
    text: str | None = None
    calls: list[Call] = field(factory=list)

    @property
    def message(self) -> Message:
        reasoning = "\n\n".join(self.reasoning)
        return Message("assistant", self.text or "", tuple(self.calls), reasoning=reasoning)


def _messages(items: list[Any]) -> Iterator[Message]:
    own: _Assistant | None = None
    for item in items:
        if not isinstance(item, dict):
            raise unwanted("input", item, "an item, which is an object")
        kind = item.get("type", "message")
        said = kind == "message" and item.get("role") == "assistant"
        later = own is not None and (own.text is not None or own.calls)
        if own is not None and (
            not (said or kind in ("function_call", "reasoning")) or (kind != "function_call" and later)
        ):
            yield own.message
            own = None
        if kind in ("function_call", "reasoning") or said:
            own = own or _Assistant()
            if kind == "function_call":
                own.calls.append(read_call(item.get("call_id"), item.get("name"), item.get("arguments"), "input"))
            elif kind == "reasoning":
                own.reasoning += [text for text in map(_text, (item.get("summary"), item.get("content"))) if text]
            else:
                own.text = _text(item.get("content"))
        elif kind == "message":
            yield _message(item)
        elif kind == "function_call_output":
            yield _result(item)
        else:
            raise unwanted("input", kind, "items of the types message, function_call, function_call_output, reasoning")
    if own is not None:
        yield own.message


def _message(item: dict[str, Any]) -> Message:
    role = "system" if item.get("role") == "developer" else item.get("role")
    if role not in ("system", "user"):
        raise unwanted("input", role, "the role user, system, developer or assistant of a message")
    (message,) = conversation([{"role": role, "content": _content(item.get("content"))}])
    return message


def _result(item: dict[str, Any]) -> Message:
    id_ = item.get("call_id")
    if not isinstance(id_, str) or not is_text(id_):
        raise unwanted("input", id_, "text as call_id of a function_call_output")
    (message,) = conversation([{"role": "tool", "content": _content(item.get("output"))}])
    return evolve(message, answers=id_)


def _content(value: Any) -> Any:
    """Return the content of an item as the content of a message: text, or a list of texts and images."""
    if not isinstance(value, list):
        return value
    return [
        {"type": "text", "text": part.get("text", part.get("refusal"))}
        if isinstance(part, dict) and part.get("type") in TEXTS
        else {"type": "image_url", "image_url": part.get("image_url")}
        if isinstance(part, dict) and part.get("type") == "input_image"
        else part
        for part in value
    ]


def _text(value: Any) -> str:
    """Return the text of content that may only be text."""
    if value is None:
        return ""
    (message,) = conversation([{"role": "assistant", "content": _content(value)}])
    return message.text


def output_items(request: ApiRequest, name: str, choice: Choice, chat: Chat) -> list[dict[str, Any]]:
    """Return a choice as items: its reasoning, its text, its calls.

    The last item has the tokens of the whole choice where the request wants them, as NeMo Gym reads them.
    """
    items: list[dict[str, Any]] = []
    if choice.reasoning:
        items.append(reasoning_item(f"rs_{name}", choice.reasoning))
    if choice.text or not choice.calls:
        logprobs = list(tokens_of(choice).entries(chat)) if request.show_logprobs else []
        items.append(message_item(f"msg_{name}", choice, logprobs))
    items += [call_item(f"fc_{name}_{i}", call) for i, call in enumerate(choice.calls)]
    if request.show_tokens:
        completion = choice.completion
        items[-1] |= {
            "prompt_token_ids": choice.prompt.tolist(),
            "generation_token_ids": completion.tokens.tolist(),
            "generation_log_probs": completion.logprobs.astype(str).astype(float).tolist(),
        }
    return items


def reasoning_item(id_: str, text: str) -> dict[str, Any]:
    """Return the item of reasoning."""
    return {"type": "reasoning", "id": id_, "summary": [{"type": "summary_text", "text": text}]}


def message_item(id_: str, choice: Choice, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the item of a text."""
    status = "incomplete" if choice.completion.stop == "length" else "completed"
    return {**empty_message(id_), "status": status, "content": [text_part(choice.text, logprobs)]}


def empty_message(id_: str) -> dict[str, Any]:
    """Return the item of a text that has not begun."""
    return {"type": "message", "id": id_, "role": "assistant", "status": "in_progress", "content": []}


def text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the part of an item that is text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def call_item(id_: str, call: Call, arguments: str | None = None) -> dict[str, Any]:
    """Return the item of a call; with `arguments`, of one that has not all of its own yet."""
    shown, status = (call.arguments, "completed") if arguments is None else (arguments, "in_progress")
    item = {"type": "function_call", "id": id_, "call_id": call.id, "name": call.name}
    return {**item, "arguments": shown, "status": status}
