"""OpenAI's Chat Completions and Completions: requests, responses, streams of events, errors."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve

from whet.interfaces.chat import Chat
from whet_endpoint.choices import Choice, Tokens, tokens_of
from whet_endpoint.decoding import Decoding
from whet_endpoint.dialects import event
from whet_endpoint.errors import ApiError, unwanted
from whet_endpoint.memory import Memory
from whet_endpoint.messages import read_messages
from whet_endpoint.requests import MODEL, MOST_CHOICES, MOST_LIKELIEST, ApiRequest, Fields, Rules, read_token_prompt
from whet_endpoint.streaming import Piece


class ChatDialect:
    """Chat Completions. Obeys `whet_endpoint.dialects.Dialect`."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def read(self, body: Any, rules: Rules, memory: Memory) -> ApiRequest:
        """Return the request in a body of `/v1/chat/completions`. Raises `ApiError`."""
        return read_chat(body, rules)

    def response(self, request: ApiRequest, name: str, choices: Sequence[Choice], chat: Chat) -> dict[str, Any]:
        """Return the whole response."""
        return {
            "id": f"{self.prefix}-{name}",
            "object": self.kind,
            "created": int(time.time()),
            "model": MODEL,
            "choices": [self._choice(request, i, choice, chat) for i, choice in enumerate(choices)],
            "usage": usage(choices),
            **({"prompt_token_ids": choices[0].prompt.tolist()} if request.show_tokens else {}),
        }

    def writer(self, request: ApiRequest, name: str, chat: Chat) -> "ChatWriter":
        """Return the writer of a stream."""
        common = {"id": f"{self.prefix}-{name}", "object": self.chunk_kind, "created": int(time.time()), "model": MODEL}
        return ChatWriter(self, request, common, chat)

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return an error as JSON."""
        return openai_error(error)

    def content(self, piece: Piece) -> dict[str, Any]:
        """Return a piece as a part of a choice."""
        return {"delta": {"reasoning_content" if piece.reasons else "content": piece.text}}

    def head(self) -> dict[str, Any] | None:
        """Return what begins a choice of a stream; None: nothing does."""
        return {"delta": {"role": "assistant", "content": ""}}

    def last(self, choice: Choice) -> dict[str, Any]:
        """Return what ends a choice of a stream, beside its finish reason."""
        return {"delta": {}}

    def calls(self, choice: Choice) -> list[dict[str, Any]]:
        """Return the calls of a choice as parts of a stream, in which they are numbered."""
        return [{"delta": {"tool_calls": [{"index": i, **call}]}} for i, call in enumerate(_calls(choice))]

    def logprobs(self, tokens: Sequence[Tokens], chat: Chat, text: Decoding, length: float) -> dict[str, Any]:
        """Return the logprobs of tokens. `text` has the tokens before them, and `length` is that of the shown text."""
        return {"content": [entry for part in tokens for entry in part.entries(chat)], "refusal": None}

    def _choice(self, request: ApiRequest, index: int, choice: Choice, chat: Chat) -> dict[str, Any]:
        completion, text = choice.completion, Decoding(chat, continues=True)
        logprobs = self.logprobs([tokens_of(choice)], chat, text, len(choice.text)) if request.show_logprobs else None
        return {
            "index": index,
            **self._whole(choice),
            "finish_reason": finish_reason(choice),
            "logprobs": logprobs,
            "weight_versions": versions(choice),
            **({"token_ids": completion.tokens.tolist()} if request.show_tokens else {}),
        }

    def _whole(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message = {**message, "content": choice.text or None, "tool_calls": _calls(choice)}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        return {"message": message}


class TextDialect(ChatDialect):
    """Completions, whose prompts are texts or tokens."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def read(self, body: Any, rules: Rules, memory: Memory) -> ApiRequest:
        """Return the request in a body of `/v1/completions`. Raises `ApiError`."""
        return read_text(body, rules)

    def content(self, piece: Piece) -> dict[str, Any]:
        """Return a piece as a part of a choice."""
        return {"text": piece.text}

    def head(self) -> dict[str, Any] | None:
        """Return None: nothing begins a choice."""
        return None

    def last(self, choice: Choice) -> dict[str, Any]:
        """Return what ends a choice of a stream."""
        return {"text": ""}

    def logprobs(self, tokens: Sequence[Tokens], chat: Chat, text: Decoding, length: float) -> dict[str, Any]:
        """Return the logprobs of tokens, by column."""
        offsets = text.offsets(np.concatenate([part.tokens for part in tokens]))
        top = [_top(entry) for part in tokens if part.likeliest for entry in part.entries(chat)]
        return {
            "tokens": [piece for part in tokens for piece in chat.pieces(part.tokens)],
            "token_logprobs": [logprob for part in tokens for logprob in part.logprobs.tolist()],
            "top_logprobs": top or None,
            "text_offset": [min(at, length) for at in offsets],
        }

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text}


class ChatWriter:
    """Writes a stream of chunks. Obeys `whet_endpoint.dialects.Writer`."""

    def __init__(self, dialect: ChatDialect, request: ApiRequest, common: dict[str, Any], chat: Chat) -> None:
        self.dialect, self.request, self.common, self.chat = dialect, request, common, chat
        self._texts = [Decoding(chat, continues=True) for _ in range(request.count)]

    def begin(self) -> bytes:
        """Return the chunks with the role of each choice."""
        if (head := self.dialect.head()) is None:
            return b""
        return b"".join(self._chunk(i, head) for i in range(self.request.count))

    def piece(self, index: int, piece: Piece, tokens: Sequence[Tokens]) -> bytes:
        """Return the chunk of a piece of text."""
        return self._chunk(index, self.dialect.content(piece), tokens)

    def end(self, choices: Sequence[Choice], rest: Sequence[Sequence[Tokens]]) -> bytes:
        """Return the last chunks: calls of tools, finish reasons, and the numbers of tokens where they are wanted."""
        chunks = []
        for i, (choice, tokens) in enumerate(zip(choices, rest, strict=True)):
            last = {"finish_reason": finish_reason(choice), "weight_versions": versions(choice)}
            common = {"prompt_token_ids": choice.prompt.tolist()} if self.request.show_tokens else {}
            chunks += [self._chunk(i, call) for call in self.dialect.calls(choice)]
            chunks.append(self._chunk(i, {**self.dialect.last(choice), **last}, tokens, common, len(choice.text)))
        if self.request.show_usage:
            chunks.append(event({**self.common, "choices": [], "usage": usage(choices)}))
        return b"".join(chunks) + event("[DONE]")

    def failed(self, error: ApiError) -> bytes:
        """Return the error as a chunk. Without `[DONE]` the stream is not complete."""
        return event(openai_error(error))

    def _chunk(
        self, index: int, content: dict[str, Any], tokens: Sequence[Tokens] = (), more: Mapping[str, Any] = {},
        length: float = math.inf,
    ) -> bytes:  # fmt: skip
        """Return a chunk. `length` is that of the whole text, where it is known."""
        ids = [int(token) for part in tokens for token in part.tokens]
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None, **content}
        if self.request.show_logprobs and ids:
            choice["logprobs"] = self.dialect.logprobs(tokens, self.chat, self._texts[index], length)
        if self.request.show_tokens and ids:
            choice["token_ids"] = ids
        return event({**self.common, **more, "choices": [choice]})


def read_chat(body: Any, rules: Rules) -> ApiRequest:
    """Return the request in a body of `/v1/chat/completions`. Raises `ApiError`."""
    fields = Fields(body, rules)
    fields.model()
    messages = read_messages(fields.take("messages"))
    tooling = fields.tools(
        fields.take("tools", []), fields.take("tool_choice", "auto"), fields.take("parallel_tool_calls", True)
    )
    limits = [fields.integer(name, 1, None) for name in ("max_completion_tokens", "max_tokens")]
    logprobs = fields.flag("logprobs")
    likeliest, schema = fields.likeliest(), fields.schema("response_format", _form(fields.mapping("response_format")))
    if likeliest and not logprobs:
        raise ApiError(400, "top_logprobs has no effect without logprobs; set logprobs: true", "top_logprobs")
    fields.flag("store")
    request = fields.request(messages, min((n for n in limits if n is not None), default=None))
    request = fields.held(request, tooling, schema)
    return _finished(evolve(request, likeliest=likeliest, show_logprobs=logprobs), fields)


def read_text(body: Any, rules: Rules) -> ApiRequest:
    """Return the request in a body of `/v1/completions`. Raises `ApiError`."""
    fields = Fields(body, rules)
    fields.model()
    prompt, limit = read_token_prompt(fields.take("prompt")), fields.integer("max_tokens", 1, None)
    logprobs = fields.integer("logprobs", 0, MOST_LIKELIEST)
    likeliest = logprobs or 0
    if likeliest and "likeliest" not in rules.extras:
        why = f"logprobs is {logprobs}, wanted 0: this generator reports the logprobs of sampled tokens alone"
        fields.unsupported("logprobs", why)
        likeliest = 0
    fields.flag("store")
    request = evolve(fields.request(prompt, limit), likeliest=likeliest, show_logprobs=logprobs is not None)
    return _finished(request, fields)


def _finished(request: ApiRequest, fields: Fields) -> ApiRequest:
    """Return the request with the fields that both have, after which nothing may be left."""
    count, options = fields.integer("n", 1, MOST_CHOICES) or 1, fields.mapping("stream_options")
    shows = options.get("include_usage")
    if not isinstance(shows, bool | None):
        raise unwanted("stream_options", options, "{include_usage: true or false}")
    tokens = fields.flag("return_token_ids")
    fields.rest()
    return evolve(request, count=count, show_usage=bool(shows), show_tokens=tokens, ignored=fields.ignored)


def _form(form: dict[str, Any]) -> dict[str, Any]:
    """Return a `response_format` of Chat in the shape of Responses."""
    inner = form.get("json_schema")
    return {"type": "text", **form, **(inner if isinstance(inner, dict) else {})}


def finish_reason(choice: Choice) -> str:
    """Return why a choice ended."""
    return "tool_calls" if choice.calls_tools else choice.completion.stop


def versions(choice: Choice) -> list[list[int]]:
    """Return which weights made which tokens of a choice: [[first token, version], ...]."""
    return [[int(first), int(version)] for first, version in choice.completion.versions]


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Return the numbers of tokens."""
    prompt, sampled = len(choices[0].prompt), sum(len(choice.completion.tokens) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return an error as JSON."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def models() -> dict[str, Any]:
    """Return the list of models, which has one."""
    return {"object": "list", "data": [model()]}


def model() -> dict[str, Any]:
    """Return the description of the model."""
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "whet"}


def _calls(choice: Choice) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in choice.calls
    ]


def _top(entry: dict[str, Any]) -> dict[str, float]:
    return {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
