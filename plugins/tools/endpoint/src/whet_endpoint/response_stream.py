"""The stream of events of the Responses dialect.

created, in_progress
item added, part added, delta, delta, ..., part done, item done      for each item: reasoning, text, calls
completed, or incomplete at a limit
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.interfaces.chat import Chat
from whet_endpoint.choices import Choice, Tokens
from whet_endpoint.dialects import event
from whet_endpoint.errors import ApiError
from whet_endpoint.response_items import call_item, empty_message, reasoning_item, text_part
from whet_endpoint.streaming import Piece

REASONING, TEXT = "reasoning", "message"
"""The types of items that come in pieces."""


class ResponsesWriter:
    """Writes a stream of events. Obeys `whet_endpoint.dialects.Writer`."""

    def __init__(
        self, begun: Mapping[str, Any], name: str, chat: Chat,
        whole: Callable[[Sequence[Choice]], dict[str, Any]],
    ) -> None:  # fmt: skip
        """`begun` is what the response has from its beginning; `whole` returns all of it."""
        self._begun, self._chat, self._whole = dict(begun), chat, whole
        self._ids = {REASONING: f"rs_{name}", TEXT: f"msg_{name}"}
        self._numbers, self._index = itertools.count(), -1
        self._open, self._reasoning = "", ""
        """The type of the item that is under way, and the reasoning so far."""

    def begin(self) -> bytes:
        """Return the events that begin a response."""
        return self._event("created", response=self._begun) + self._event("in_progress", response=self._begun)

    def piece(self, index: int, piece: Piece, tokens: Sequence[Tokens]) -> bytes:
        """Return the event of a piece, after the events that begin its item."""
        if piece.reasons:
            events, self._reasoning = self._item_begins(REASONING), self._reasoning + piece.text
            return events + self._part("reasoning_summary_text.delta", summary_index=0, delta=piece.text)
        entries = [entry for part in tokens for entry in part.entries(self._chat)]
        events = self._item_begins(TEXT)
        return events + self._part("output_text.delta", content_index=0, delta=piece.text, logprobs=entries)

    def end(self, choices: Sequence[Choice], rest: Sequence[Sequence[Tokens]]) -> bytes:
        """Return the events that end the items and the response."""
        response = self._whole(choices)
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        events = b""
        for item in response["output"][: len(response["output"]) - len(calls)]:
            if item["type"] == TEXT or self._open != TEXT:
                events += self._item_begins(item["type"])
        for item in response["output"]:
            if item["type"] == self._open:
                events += self._item_ends(item)
        for call, item in zip(choices[0].calls, calls, strict=True):
            events += self._call(item, call_item(item["id"], call, arguments=""))
        return events + self._event(response["status"], response=response)

    def failed(self, error: ApiError) -> bytes:
        """Return the event of a response that failed."""
        failure = {"code": "server_error", "message": str(error)}
        return self._event("failed", response={**self._begun, "status": "failed", "error": failure})

    def _item_begins(self, kind: str) -> bytes:
        """Return the events that end the reasoning and begin an item, unless the item is under way."""
        if self._open == kind:
            return b""
        events = self._item_ends(reasoning_item(self._ids[REASONING], self._reasoning)) if self._open else b""
        self._open, self._index = kind, self._index + 1
        if kind == REASONING:
            events += self._added({**reasoning_item(self._ids[kind], ""), "summary": []})
            part = {"type": "summary_text", "text": ""}
            return events + self._part("reasoning_summary_part.added", summary_index=0, part=part)
        events += self._added(empty_message(self._ids[kind]))
        return events + self._part("content_part.added", content_index=0, part=text_part(""))

    def _item_ends(self, item: dict[str, Any]) -> bytes:
        """Return the events that end the item under way."""
        if item["type"] == REASONING:
            (part,) = item["summary"]
            events = self._part("reasoning_summary_text.done", summary_index=0, text=part["text"])
            events += self._part("reasoning_summary_part.done", summary_index=0, part=part)
        else:
            (part,) = item["content"]
            shown = {"text": part["text"], "logprobs": part["logprobs"]}
            events = self._part("output_text.done", content_index=0, **shown)
            events += self._part("content_part.done", content_index=0, part=part)
        self._open = ""
        return events + self._done(item)

    def _call(self, item: dict[str, Any], begun: dict[str, Any]) -> bytes:
        self._index += 1
        where = {"output_index": self._index, "item_id": item["id"]}
        events = self._added(begun)
        events += self._event("function_call_arguments.delta", **where, delta=item["arguments"])
        events += self._event("function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"])
        return events + self._done(item)

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("output_item.added", output_index=self._index, item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        return self._event("output_item.done", output_index=self._index, item=item)

    def _part(self, kind: str, **data: Any) -> bytes:
        """Return an event of the item under way."""
        return self._event(kind, output_index=self._index, item_id=self._ids[self._open], **data)

    def _event(self, kind: str, **data: Any) -> bytes:
        name = f"response.{kind}"
        return event({"type": name, "sequence_number": next(self._numbers), **data}, name)
