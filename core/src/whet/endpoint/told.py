"""Writes answers in the terms of OpenAI's API: replies, streams of events, errors."""

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from whet.data.messages import Call
from whet.data.records import Completion, IntArray
from whet.endpoint.asked import MODEL, Asked
from whet.endpoint.refused import Refused

Pieces = Callable[[IntArray], list[str]]
"""Gives the text of each token."""


@frozen(eq=False)
class Answer:
    """One answer to a request."""

    prompt: IntArray
    """All tokens before it: [prompt]."""
    completion: Completion
    text: str
    """As it is shown: without special tokens, up to where a stop string of the request or a call of a tool begins."""
    calls: tuple[Call, ...] = ()
    """Of tools, after the text."""


def reply(asked: Asked, name: str, answers: Sequence[Answer], pieces: Pieces) -> dict[str, Any]:
    """Write the reply to a request; `name` is unique. A stream is written from it, see `events`."""
    prompt = answers[0].prompt
    made = sum(len(answer.completion.tokens) for answer in answers)
    return {
        "id": f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if asked.is_chat else "text_completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [_choice(asked, i, answer, pieces) for i, answer in enumerate(answers)],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": made, "total_tokens": len(prompt) + made},
        **({"prompt_token_ids": prompt.tolist()} if asked.show_tokens else {}),
    }


def _choice(asked: Asked, index: int, answer: Answer, pieces: Pieces) -> dict[str, Any]:
    completion = answer.completion
    said: dict[str, Any] = {"text": answer.text}
    if asked.is_chat:
        said = {"message": _message(answer)}
    return {
        "index": index,
        **said,
        "finish_reason": "tool_calls" if answer.calls and completion.stop == "stop" else completion.stop,
        "logprobs": _logprobs(asked, completion, pieces) if asked.show_logprobs else None,
        "weight_versions": [[int(first), int(version)] for first, version in completion.versions],
        **({"token_ids": completion.tokens.tolist()} if asked.show_tokens else {}),
    }


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message


def _logprobs(asked: Asked, completion: Completion, pieces: Pieces) -> dict[str, Any]:
    """Write the logprobs of all tokens of an answer, the one that ended it included."""
    tokens, logprobs = pieces(completion.tokens), completion.logprobs.tolist()
    if asked.is_chat:
        content = [
            {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}
    starts = list(itertools.accumulate(map(len, tokens[:-1]), initial=0))
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": starts}


def events(asked: Asked, whole: Mapping[str, Any]) -> bytes:
    """Write a reply as server-sent events: what was said in one, how it ended in the next."""
    common = {name: whole[name] for name in ("id", "created", "model")}
    common["object"] = "chat.completion.chunk" if asked.is_chat else "text_completion"
    chunks: list[dict[str, Any]] = [{**common, "choices": [_begun(choice)]} for choice in whole["choices"]]
    chunks += [{**common, "choices": [_ended(choice)]} for choice in whole["choices"]]
    if asked.show_tokens:
        chunks[0]["prompt_token_ids"] = whole["prompt_token_ids"]
    if asked.show_usage:
        chunks.append({**common, "choices": [], "usage": whole["usage"]})
    return b"".join(_event(json.dumps(chunk)) for chunk in chunks) + _event("[DONE]")


def _begun(choice: Mapping[str, Any]) -> dict[str, Any]:
    said = {"delta": _delta(choice["message"])} if "message" in choice else {"text": choice["text"]}
    kept = {name: choice[name] for name in ("index", "logprobs", "token_ids") if name in choice}
    return {**kept, **said, "finish_reason": None}


def _delta(message: Mapping[str, Any]) -> dict[str, Any]:
    """Give a whole message as a part of one: there calls are numbered."""
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", []))]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _ended(choice: Mapping[str, Any]) -> dict[str, Any]:
    nothing: dict[str, Any] = {"delta": {}} if "message" in choice else {"text": ""}
    kept = {name: choice[name] for name in ("index", "finish_reason", "weight_versions")}
    return {**kept, **nothing, "logprobs": None}


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def error(refused: Refused) -> dict[str, Any]:
    """Write an error."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}


def models() -> dict[str, Any]:
    """List the models: there is one."""
    return {"object": "list", "data": [model()]}


def model() -> dict[str, Any]:
    """Describe the model."""
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "whet"}
