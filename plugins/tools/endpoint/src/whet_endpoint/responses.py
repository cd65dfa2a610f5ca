"""Responses in the format of OpenAI's API: whole responses, streams of events, errors."""

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from whet.data.messages import Call
from whet.data.records import Completion, IntArray
from whet_endpoint.errors import ApiError
from whet_endpoint.requests import MODEL, ApiRequest

Pieces = Callable[[IntArray], list[str]]
"""Returns the text of each token."""


@frozen(eq=False)
class Choice:
    """One completion of a request."""

    prompt: IntArray
    """All tokens before it: [prompt]."""
    completion: Completion
    text: str
    """The shown text: without special tokens, up to a stop string of the request or the first call of a tool."""
    calls: tuple[Call, ...] = ()
    """Calls of tools after the text."""


def response(request: ApiRequest, name: str, choices: Sequence[Choice], pieces: Pieces) -> dict[str, Any]:
    """Return the response to a request; `name` is unique. `events` makes a stream of it."""
    prompt = choices[0].prompt
    sampled = sum(len(choice.completion.tokens) for choice in choices)
    return {
        "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if request.is_chat else "text_completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [_choice(request, i, choice, pieces) for i, choice in enumerate(choices)],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled},
        **({"prompt_token_ids": prompt.tolist()} if request.show_tokens else {}),
    }


def _choice(request: ApiRequest, index: int, choice: Choice, pieces: Pieces) -> dict[str, Any]:
    completion = choice.completion
    content: dict[str, Any] = {"text": choice.text}
    if request.is_chat:
        content = {"message": _message(choice)}
    return {
        "index": index,
        **content,
        "finish_reason": "tool_calls" if choice.calls and completion.stop == "stop" else completion.stop,
        "logprobs": _logprobs(request, completion, pieces) if request.show_logprobs else None,
        "weight_versions": [[int(first), int(version)] for first, version in completion.versions],
        **({"token_ids": completion.tokens.tolist()} if request.show_tokens else {}),
    }


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return message


def _logprobs(request: ApiRequest, completion: Completion, pieces: Pieces) -> dict[str, Any]:
    """Return the logprobs of all tokens of a completion, the stop token included."""
    tokens, logprobs = pieces(completion.tokens), completion.logprobs.tolist()
    if request.is_chat:
        content = [
            {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}
    starts = list(itertools.accumulate(map(len, tokens[:-1]), initial=0))
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": starts}


def events(request: ApiRequest, whole: Mapping[str, Any]) -> bytes:
    """Return a response as server-sent events: the content of each choice in one, its end in another."""
    common = {name: whole[name] for name in ("id", "created", "model")}
    common["object"] = "chat.completion.chunk" if request.is_chat else "text_completion"
    chunks: list[dict[str, Any]] = [{**common, "choices": [_content(choice)]} for choice in whole["choices"]]
    chunks += [{**common, "choices": [_end(choice)]} for choice in whole["choices"]]
    if request.show_tokens:
        chunks[0]["prompt_token_ids"] = whole["prompt_token_ids"]
    if request.show_usage:
        chunks.append({**common, "choices": [], "usage": whole["usage"]})
    return b"".join(_event(json.dumps(chunk)) for chunk in chunks) + _event("[DONE]")


def _content(choice: Mapping[str, Any]) -> dict[str, Any]:
    content = {"delta": _delta(choice["message"])} if "message" in choice else {"text": choice["text"]}
    kept = {name: choice[name] for name in ("index", "logprobs", "token_ids") if name in choice}
    return {**kept, **content, "finish_reason": None}


def _delta(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole message as the only part of a stream, in which calls are numbered."""
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", []))]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _end(choice: Mapping[str, Any]) -> dict[str, Any]:
    nothing: dict[str, Any] = {"delta": {}} if "message" in choice else {"text": ""}
    kept = {name: choice[name] for name in ("index", "finish_reason", "weight_versions")}
    return {**kept, **nothing, "logprobs": None}


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def error(found: ApiError) -> dict[str, Any]:
    """Return an error as JSON."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(found.status, "invalid_request_error" if found.status < 500 else "server_error")
    return {"error": {"message": str(found), "type": kind, "param": found.param, "code": found.code}}


def models() -> dict[str, Any]:
    """Return the list of models, which has one."""
    return {"object": "list", "data": [model()]}


def model() -> dict[str, Any]:
    """Return the description of the model."""
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "whet"}
