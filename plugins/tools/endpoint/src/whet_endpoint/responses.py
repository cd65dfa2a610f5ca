"""OpenAI's Responses: requests and responses."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from whet.data.messages import Message
from whet.interfaces.chat import Chat
from whet_endpoint.chat import openai_error, versions
from whet_endpoint.choices import Choice
from whet_endpoint.errors import ApiError, unwanted
from whet_endpoint.memory import Memory, response_id
from whet_endpoint.messages import MOST_NESTED, nests, refuse_last_assistant
from whet_endpoint.requests import FREELY, MODEL, ApiRequest, Fields, Rules
from whet_endpoint.response_items import output_items, read_items
from whet_endpoint.response_stream import ResponsesWriter

REPEATED = ("metadata", "user", "safety_identifier", "prompt_cache_key", "service_tier")
"""Parameters that change nothing and are repeated in the response."""


class ResponsesDialect:
    """Responses. Obeys `whet_endpoint.dialects.Dialect`."""

    def read(self, body: Any, rules: Rules, memory: Memory) -> ApiRequest:
        """Return the request in a body of `/v1/responses`. Raises `ApiError`."""
        fields = Fields(body, rules)
        asked = {name: body[name] for name in REPEATED if body.get(name) is not None}
        fields.model()
        before, previous = self._before(fields, memory)
        history = (*before, *read_items(fields.take("input", [])))
        refuse_last_assistant(history, "input")
        instructions = fields.take("instructions", "")
        if not isinstance(instructions, str):
            raise unwanted("instructions", instructions, "text")
        prompt = (Message("system", instructions), *history) if instructions else history
        choice, parallel = fields.take("tool_choice", "auto"), fields.take("parallel_tool_calls", True)
        tooling = fields.tools(_tools(fields.take("tools", []), fields), choice, parallel)
        show_logprobs, likeliest = self._logprobs(fields)
        self._without_effect(fields)
        form = fields.mapping("text")
        for name in (key for key, value in form.items() if key != "format" and value is not None):
            fields.unsupported("text", f"text.{name:.80} is set, and {FREELY}", f"text.{name:.80}")
        schema = fields.schema("text", form.get("format") or {"type": "text"})
        request = fields.request(prompt, fields.integer("max_output_tokens", 1, None))
        stores, tokens = fields.flag("store", True), fields.flag("return_token_ids")
        fields.rest()
        asked |= {
            "instructions": instructions or None, "previous_response_id": previous, "store": stores,
            "tools": [_shown_tool(json.loads(tool)) for tool in tooling.tools],
            "parallel_tool_calls": parallel if tooling.schema else True,
            "tool_choice": choice if tooling.schema or choice in ("auto", "none") else "auto",
            "text": {"format": form.get("format") if schema else {"type": "text"}},
            "max_output_tokens": request.sampling.max_tokens, "top_logprobs": likeliest,
        }  # fmt: skip
        asked = {name: _repeatable(name, value) for name, value in asked.items()}
        return evolve(
            fields.held(request, tooling, schema), show_logprobs=show_logprobs, likeliest=likeliest, show_tokens=tokens,
            history=history, kept=stores, asked=asked, ignored=fields.ignored,
        )  # fmt: skip

    def response(self, request: ApiRequest, name: str, choices: Sequence[Choice], chat: Chat) -> dict[str, Any]:
        """Return the whole response."""
        (choice,) = choices
        cut = choice.completion.stop == "length"
        return {
            **_begun(request, name),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output_items(request, name, choice, chat),
            "usage": _usage(choice),
            "weight_versions": versions(choice),
        }

    def writer(self, request: ApiRequest, name: str, chat: Chat) -> ResponsesWriter:
        """Return the writer of a stream."""
        begun = _begun(request, name)
        return ResponsesWriter(begun, name, chat, lambda choices: self.response(request, name, choices, chat))

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return an error as JSON."""
        return openai_error(error)

    def _before(self, fields: Fields, memory: Memory) -> tuple[tuple[Message, ...], str | None]:
        """Return the conversation that a request continues by the id of a response, and this id."""
        previous = fields.take("previous_response_id")
        if previous is None:
            return (), None
        found = memory.find(previous) if isinstance(previous, str) else None
        if found is None:
            raise ApiError(
                400, f"there is no response {previous!r:.80} of this key; send the whole conversation as input",
                "previous_response_id", "previous_response_not_found",
            )  # fmt: skip
        return found, previous

    def _logprobs(self, fields: Fields) -> tuple[bool, int]:
        include = fields.take("include", [])
        if not isinstance(include, list) or not all(isinstance(name, str) for name in include):
            raise unwanted("include", include, "a list of names")
        for name in include:
            if name not in ("message.output_text.logprobs", "reasoning.encrypted_content"):
                fields.unsupported("include", f"include has {name:.80}, which this model does not have")
        likeliest = fields.likeliest()
        return "message.output_text.logprobs" in include or likeliest > 0, likeliest

    def _without_effect(self, fields: Fields) -> None:
        """Read the fields that are honoured by doing nothing, and refuse what would change the response."""
        fields.mapping("stream_options")
        effort = {name: value for name, value in fields.mapping("reasoning").items() if value is not None}
        if wanted := sorted(effort.keys() - {"summary", "generate_summary"}):
            fields.unsupported("reasoning", f"reasoning.{wanted[0]:.40} is set, and the chat template decides on it")
        if fields.rules.fixed:
            fields.integer("max_tool_calls", 1, None)  # the agent calls them itself


def _repeatable(name: str, value: Any) -> Any:
    """Return a parameter that a response repeats. Raises `ApiError` for one that JSON does not have."""
    if nests(value):
        raise ApiError(400, f"{name} nests deeper than {MOST_NESTED} lists and objects", name)
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise unwanted(name, value, "JSON, which has no NaN and no Infinity") from None
    return value


def _begun(request: ApiRequest, name: str) -> dict[str, Any]:
    """Return what a response has from its beginning."""
    sampling = request.sampling
    return {
        "id": response_id(name), "object": "response", "created_at": int(time.time()), "model": MODEL,
        "status": "in_progress", "background": False, "error": None, "incomplete_details": None, "output": [],
        "temperature": sampling.temperature, "top_p": sampling.top_p, "truncation": "disabled", "usage": None,
        "reasoning": {"effort": None, "summary": None}, "metadata": {}, **request.asked,
    }  # fmt: skip


def _usage(choice: Choice) -> dict[str, Any]:
    prompt, sampled = len(choice.prompt), len(choice.completion.tokens)
    return {
        "input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + sampled,
    }  # fmt: skip


def _tools(given: Any, fields: Fields) -> list[Any]:
    """Return the tools of a request in the format of Chat. Tools that run at OpenAI are not supported."""
    if not isinstance(given, list):
        raise unwanted("tools", given, "a list of tools")
    functions = []
    for i, tool in enumerate(given):
        if isinstance(tool, dict) and tool.get("type") == "function":
            function = {key: value for key, value in tool.items() if key != "type"}
            if function.pop("strict", False):
                # Clients of this dialect set it unless they are told otherwise. The response says `strict: false`.
                fields.note("strict")
            functions.append({"type": "function", "function": function})
        else:
            kind = tool.get("type") if isinstance(tool, dict) else tool
            fields.unsupported("tools", f"tools[{i}] is {kind!r:.80}, and the model calls functions alone")
    return functions


def _shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as a response repeats it."""
    return {"type": "function", "parameters": None, "strict": False, **tool["function"]}
