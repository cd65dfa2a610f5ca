"""Anthropic's Messages: requests, responses, streams of events, errors.

message_start
content_block_start, content_block_delta, ..., content_block_stop     for each block: thinking, text, tool_use
message_delta, message_stop
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import evolve

from whet.data.messages import Conversation, Message, conversation
from whet.interfaces.chat import Chat
from whet_endpoint.chat import versions
from whet_endpoint.choices import Choice, Tokens
from whet_endpoint.dialects import event
from whet_endpoint.errors import ApiError, unwanted
from whet_endpoint.memory import Memory
from whet_endpoint.messages import checked_messages, is_text, read_call
from whet_endpoint.requests import FREELY, MODEL, ApiRequest, Fields, Rules
from whet_endpoint.streaming import Piece

THINKING, TEXT = "thinking", "text"
KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error",
}  # fmt: skip
"""Types of errors by status; others are `api_error`, or `invalid_request_error` below 500."""


class MessagesDialect:
    """Messages. Obeys `whet_endpoint.dialects.Dialect`."""

    def read(self, body: Any, rules: Rules, memory: Memory) -> ApiRequest:
        """Return the request in a body of `/v1/messages`. Raises `ApiError`."""
        fields = Fields(body, rules)
        fields.model()
        prompt = (*_system(fields.take("system", "")), *checked_messages(fields.take("messages"), _messages))
        choice, parallel = _choice(fields.take("tool_choice", {"type": "auto"}))
        tooling = fields.tools(_tools(fields.take("tools", []), fields), choice, parallel)
        wanted = fields.mapping("thinking")
        if wanted.get("budget_tokens") is not None:
            fields.note("thinking.budget_tokens")
        thinking = wanted.get("type", "disabled")
        if thinking not in ("disabled", "enabled", "adaptive"):
            raise unwanted("thinking", thinking, "the type enabled, adaptive or disabled")
        request = fields.request(prompt, fields.integer("max_tokens", 1, None), "stop_sequences")
        tokens = fields.flag("return_token_ids")
        fields.rest()
        return evolve(
            fields.held(request, tooling), show_reasoning=thinking != "disabled", show_tokens=tokens,
            ignored=fields.ignored,
        )  # fmt: skip

    def response(self, request: ApiRequest, name: str, choices: Sequence[Choice], chat: Chat) -> dict[str, Any]:
        """Return the whole response."""
        (choice,) = choices
        tokens = {"prompt_token_ids": choice.prompt.tolist(), "token_ids": choice.completion.tokens.tolist()}
        return {
            **_begun(name),
            "content": list(_blocks(choice, request.show_reasoning)),
            **_ended(choice),
            "usage": {**_NO_USAGE, "input_tokens": len(choice.prompt), "output_tokens": len(choice.completion.tokens)},
            "weight_versions": versions(choice),
            **(tokens if request.show_tokens else {}),
        }

    def writer(self, request: ApiRequest, name: str, chat: Chat) -> "MessagesWriter":
        """Return the writer of a stream."""
        return MessagesWriter(name, request.show_reasoning)

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return an error as JSON."""
        return _error(error)


class MessagesWriter:
    """Writes a stream of events. Obeys `whet_endpoint.dialects.Writer`."""

    def __init__(self, name: str, show_reasoning: bool) -> None:
        self._name, self._shows, self._open, self._index = name, show_reasoning, "", -1

    def begin(self) -> bytes:
        """Return the event that begins a message. The length of the prompt is known at its end."""
        return _event("message_start", message={**_begun(self._name), "content": [], "usage": dict(_NO_USAGE)})

    def piece(self, index: int, piece: Piece, tokens: Sequence[Tokens]) -> bytes:
        """Return the event of a piece, after the events that begin its block."""
        if piece.reasons and not self._shows:
            return b""
        kind = THINKING if piece.reasons else TEXT
        return self._block(kind) + self._delta(f"{kind}_delta", **{kind: piece.text})

    def end(self, choices: Sequence[Choice], rest: Sequence[Sequence[Tokens]]) -> bytes:
        """Return the events that end the blocks and the message."""
        (choice,) = choices
        events = self._close() if self._open or choice.calls else self._block(TEXT) + self._close()
        for call in choice.calls:
            self._index += 1
            begun = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            events += _event("content_block_start", index=self._index, content_block=begun)
            events += self._delta("input_json_delta", partial_json=call.arguments)
            events += _event("content_block_stop", index=self._index)
        usage = {**_NO_USAGE, "input_tokens": len(choice.prompt), "output_tokens": len(choice.completion.tokens)}
        return events + _event("message_delta", delta=_ended(choice), usage=usage) + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        """Return the event of a message that failed."""
        return event(_error(error), "error")

    def _block(self, kind: str) -> bytes:
        """Return the events that end another block and begin this one, unless it is under way."""
        if self._open == kind:
            return b""
        events = self._close()
        self._open, self._index = kind, self._index + 1
        begun = {"type": kind, kind: "", **({"signature": ""} if kind == THINKING else {})}
        return events + _event("content_block_start", index=self._index, content_block=begun)

    def _close(self) -> bytes:
        was, self._open = self._open, ""
        if not was:
            return b""
        signed = self._delta("signature_delta", signature="") if was == THINKING else b""
        return signed + _event("content_block_stop", index=self._index)

    def _delta(self, kind: str, **data: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **data})


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


_NO_USAGE = {"input_tokens": 0, "output_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _begun(name: str) -> dict[str, Any]:
    begun = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": MODEL}
    return {**begun, "stop_reason": None, "stop_sequence": None}


def _ended(choice: Choice) -> dict[str, Any]:
    """Return why a choice ended."""
    if choice.calls_tools:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if choice.completion.stop == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "stop_sequence" if choice.stop else "end_turn", "stop_sequence": choice.stop or None}


def _blocks(choice: Choice, show_reasoning: bool) -> Iterator[dict[str, Any]]:
    if choice.reasoning and show_reasoning:
        yield {"type": THINKING, THINKING: choice.reasoning, "signature": ""}
    if choice.text or not (choice.calls or (choice.reasoning and show_reasoning)):
        yield {"type": TEXT, TEXT: choice.text}
    for call in choice.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


def _error(error: ApiError) -> dict[str, Any]:
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _system(value: Any) -> Conversation:
    text = _text("system", value)
    return (Message("system", text),) if text else ()


def _messages(item: Any) -> Iterator[Message]:
    """Yield the messages of one of Anthropic's: results of tools are messages of their own."""
    role, content = (item.get("role"), item.get("content")) if isinstance(item, dict) else (None, None)
    if role not in ("user", "assistant", "system"):
        raise unwanted("messages", role, "the role user or assistant of a message")
    blocks = [{"type": TEXT, TEXT: content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise unwanted("messages", content, "text or a list of blocks as content")
    if role == "assistant":
        yield _assistant(blocks)
        return
    if not blocks:
        raise unwanted("messages", content, "text, or at least one block, as content")
    parts: list[Any] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            parts.append(_part(block))
            continue
        if parts:
            yield from conversation([{"role": role, "content": parts}])
            parts = []
        id_ = block.get("tool_use_id")
        if not isinstance(id_, str) or not is_text(id_):
            raise unwanted("messages", id_, "text as tool_use_id of a tool_result")
        yield Message("tool", _text("messages", block.get("content") or ""), answers=id_)
    if parts:
        yield from conversation([{"role": role, "content": parts}])


def _assistant(blocks: list[Any]) -> Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            arguments = block.get("input")
            shown = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
            calls.append(read_call(block.get("id"), block.get("name"), shown, "messages"))
        elif kind == THINKING:
            thoughts.append(_text("messages", block.get(THINKING)))
        elif kind != "redacted_thinking":
            texts.append(_text("messages", [block]))
    return Message("assistant", "".join(texts), tuple(calls), reasoning="\n\n".join(thoughts))


def _part(block: dict[str, Any]) -> dict[str, Any]:
    source = block.get("source")
    if block.get("type") == "image" and isinstance(source, dict):
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image", "url": url}
    return block


def _text(param: str, value: Any) -> str:
    """Return content that may only be text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(b, dict) and isinstance(b.get(TEXT), str) for b in value):
        return "".join(block[TEXT] for block in value)
    raise unwanted(param, value, "text, or a list of blocks of text")


def _choice(value: Any) -> tuple[Any, bool]:
    """Return `tool_choice` and `parallel_tool_calls` as in Chat."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("auto", "none", "any", "tool"):
        raise unwanted("tool_choice", value, "the type auto, none, any or tool")
    named = {"any": "required", "tool": {"type": "function", "name": value.get("name")}}
    return named.get(kind, kind), not value.get("disable_parallel_tool_use")


def _tools(given: Any, fields: Fields) -> list[Any]:
    """Return the tools of a request in the format of Chat. Tools that run at Anthropic are not supported."""
    if not isinstance(given, list):
        raise unwanted("tools", given, "a list of tools")
    functions = []
    for i, tool in enumerate(given):
        if isinstance(tool, dict) and tool.get("type", "custom") == "custom":
            kept = {k: tool[k] for k in ("name", "description", "strict") if tool.get(k) is not None}
            functions.append({"type": "function", "function": {**kept, "parameters": tool.get("input_schema")}})
        else:
            kind = tool.get("type") if isinstance(tool, dict) else tool
            fields.unsupported("tools", f"tools[{i}] is {kind!r:.80}, and {FREELY}: there are tools of your own alone")
    return functions
