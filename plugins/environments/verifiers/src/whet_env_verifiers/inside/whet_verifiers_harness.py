"""A harness of verifiers: a conversation with the taskset's tools, in this process.

It takes 0.4 s for an episode. The harness `null` takes 7 to 12 s, because it starts a program for each episode.
"""

import json
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from aiohttp import ClientSession, ClientTimeout
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ConversationHarness"]
_CONTEXT = "context_length_exceeded"
_LONGEST = 2000


class ConversationConfig(vf.HarnessConfig):  # type: ignore[misc]  # verifiers is not installed where types are checked
    """The config of `ConversationHarness`."""


class ConversationHarness(vf.Harness[ConversationConfig]):  # type: ignore[misc]  # as above
    """Asks the model, answers its tool calls, and ends with a response without calls."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
    ) -> Any:
        """Play one segment of the conversation. A full context ends it, and the messages so far are scored."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
        messages.extend(said)
        async with AsyncExitStack() as stack:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            described, dispatch, clients = await connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(ClientSession(timeout=ClientTimeout(total=None)))
            body = {"model": ctx.model, "messages": messages, **({"tools": described} if described else {})}
            headers = {"Authorization": f"Bearer {secret}"}
            while True:
                async with client.post(f"{endpoint}/chat/completions", json=body, headers=headers) as reply:
                    text = await reply.text()
                if reply.status != 200:
                    over = reply.status == 400 and _CONTEXT in text
                    return vf.ProgramResult(exit_code=0 if over else 1, stdout="", stderr=text[:_LONGEST])
                message = json.loads(text)["choices"][0]["message"]
                messages.append({name: value for name, value in message.items() if value is not None})
                messages[-1].setdefault("content", "")
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    content = await _answer(clients, dispatch, call["function"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def _answer(clients: Any, dispatch: Any, call: Any) -> Any:
    """Return the result of a call, or what is wrong with it, for the model."""
    if call["name"] not in dispatch:
        return f"error: there is no tool {call['name']!r}; there are {', '.join(sorted(dispatch))}"
    try:
        arguments = json.loads(call["arguments"] or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments must be a JSON object"
    return await call_mcp(clients, dispatch, call["name"], arguments)
