"""The dialects of the endpoint: how each reads requests, and writes responses, streams and errors.

path                      dialect
/v1/chat/completions      OpenAI's Chat Completions
/v1/completions           OpenAI's Completions
/v1/responses             OpenAI's Responses
/v1/messages              Anthropic's Messages
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from whet.interfaces.chat import Chat
from whet_endpoint.choices import Choice, Tokens
from whet_endpoint.errors import ApiError
from whet_endpoint.memory import Memory
from whet_endpoint.requests import ApiRequest, Rules
from whet_endpoint.streaming import Piece


class Writer(Protocol):
    """Writes one response as server-sent events."""

    def begin(self) -> bytes:
        """Return the events before the first token."""

    def piece(self, index: int, piece: Piece, tokens: Sequence[Tokens]) -> bytes:
        """Return the events of a piece of a choice. `tokens` are those since the last piece of the choice."""

    def end(self, choices: Sequence[Choice], rest: Sequence[Sequence[Tokens]]) -> bytes:
        """Return the events after the last piece. `rest` has the tokens of each choice since its last piece."""

    def failed(self, error: ApiError) -> bytes:
        """Return the events of a response that failed on its way."""


class Dialect(Protocol):
    """One way to ask and to answer."""

    def read(self, body: Any, rules: Rules, memory: Memory) -> ApiRequest:
        """Return the request in a body. Raises `ApiError`."""

    def response(self, request: ApiRequest, name: str, choices: Sequence[Choice], chat: Chat) -> dict[str, Any]:
        """Return the whole response; `name` is unique."""

    def writer(self, request: ApiRequest, name: str, chat: Chat) -> Writer:
        """Return the writer of a stream."""

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return an error as JSON."""


def event(data: Mapping[str, Any] | str, name: str = "") -> bytes:
    """Return one server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"event: {name}\ndata: {text}\n\n".encode() if name else f"data: {text}\n\n".encode()
