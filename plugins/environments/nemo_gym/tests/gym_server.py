"""Servers as NeMo Gym's on the loopback address: a counter for each session, an agent, and what servers do wrong."""

import asyncio
import json
import re
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
from aiohttp import web

from whet_testing.http_server import served

TOOLS = [
    {
        "type": "function", "name": "increment_counter", "description": "Add to the counter.", "strict": True,
        "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    },
    {"type": "function", "name": "get_counter_value", "strict": True,
     "parameters": {"type": "object", "properties": {}}},
]  # fmt: skip
MANDATORY = ("id", "object", "created_at", "model", "output", "parallel_tool_calls", "tool_choice", "tools")


def record(add: int = 2, start: int = 3) -> dict[str, Any]:
    asked = [{"role": "user", "content": f"add {add}, then get the count"}]
    return {
        "responses_create_params": {"input": asked, "tools": TOOLS},
        "initial_count": start,
        "expected_count": start + add,
    }


class CounterServer:
    """The reward is whether the count is `expected_count` and the last message names it. `trouble` is what it does
    wrong to each request of `route`.
    """

    def __init__(self) -> None:
        self.url, self.trouble, self.route = "", "", "verify"
        self.counters: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self.open = self.peak = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        route, body = request.path.strip("/"), await request.json()
        if self.trouble and route == self.route:
            return await self._go_wrong(request)
        if route == "seed_session":
            if "initial_count" not in body:
                return web.json_response({"detail": "initial_count: field required"}, status=422)
            self.open += 1
            self.peak = max(self.peak, self.open)
            return self._named({}, self._key(body["initial_count"]))
        key = request.cookies.get("Counter", "")
        if key not in self.counters:  # as theirs: an empty session, and no error
            key = self._key(0)
        if route == "increment_counter":
            if not isinstance(body.get("count"), int):
                return web.json_response({"detail": "count: an integer is required"}, status=422)
            self.counters[key] += body["count"]
            return self._named({"success": True}, self._key(self.counters.pop(key)))  # a new cookie each time
        if route == "get_counter_value":
            return self._named({"count": self.counters[key]}, key)
        if missing := [name for name in MANDATORY if name not in body["response"]]:
            return web.json_response({"detail": f"{missing} missing"}, status=422)
        self.verified.append(body)
        self.open -= 1
        last = body["response"]["output"][-1]
        text = last["content"][0]["text"] if last["type"] == "message" else ""
        counted = self.counters.pop(key) == body["expected_count"]
        told = re.findall(r"-?\d+", text) == [str(body["expected_count"])]
        parts = {"counted": float(counted), "told": float(told)}
        return web.json_response({**body, "reward": float(counted and told), "reward_components": parts})

    def _key(self, count: int) -> str:
        key = uuid.uuid4().hex
        self.counters[key] = count
        return key

    def _named(self, value: Any, key: str) -> web.Response:
        reply = web.json_response(value)
        reply.set_cookie("Counter", key)
        return reply

    async def _go_wrong(self, request: web.Request) -> web.StreamResponse:
        if self.trouble == "hangs":
            await asyncio.sleep(2)
        if self.trouble == "closes" and request.transport:
            request.transport.close()
        status, body = TROUBLES[self.trouble]
        return web.Response(status=status, text=body)


TROUBLES: dict[str, tuple[int, str]] = {
    "hangs": (200, "{}"),
    "closes": (200, "{}"),
    "sends too much": (200, "x" * 200_000),
    "fails": (500, "Internal Server Error"),
    "sends no JSON": (200, "<html>"),
    "sends deep JSON": (200, "[" * 100_000),
    "sends a list": (200, "[1]"),
    "gives no reward": (200, "{}"),
    "rewards with NaN": (200, '{"reward": NaN}'),
    "rewards with text": (200, '{"reward": "1"}'),
    "rewards a component with infinity": (200, '{"reward": 1, "reward_components": {"a": Infinity}}'),
    "has components that are a list": (200, '{"reward": 1, "reward_components": [1]}'),
}


class AgentServer:
    """An agent server as NeMo Gym's `simple_agent`: it seeds, asks the model, runs the tools, and has it verified.

    `trouble` is what it does wrong.
    """

    def __init__(self, resources: str) -> None:
        self.url, self.trouble, self.resources = "", "", resources
        self.model = f"http://127.0.0.1:{free_port()}"

    async def run(self, request: web.Request) -> web.StreamResponse:
        record = await request.json()
        if "expected_count" not in record:
            return web.json_response({"detail": "expected_count: field required"}, status=422)
        if self.trouble == "plays alone":
            return web.json_response({**record, "response": {}, "reward": 1.0})
        if self.trouble == "drops the metadata":
            del record["responses_create_params"]["metadata"]
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
            try:
                return web.json_response(await self._played(client, record))
            except (RuntimeError, aiohttp.ClientError) as error:
                return web.json_response(repr(error), status=500)

    async def _played(self, client: aiohttp.ClientSession, record: dict[str, Any]) -> Any:
        async def posted(url: str, body: Any) -> Any:
            async with client.post(url, json=body) as reply:
                if not reply.ok:
                    raise RuntimeError(f"{url} answers {await reply.text()}")
                return await reply.json()

        await posted(f"{self.resources}/seed_session", record)
        params, items = record["responses_create_params"], list[Any]()
        while True:
            asked = {**params, "input": params["input"] + items}
            found = await posted(f"{self.model}/v1/responses", asked)
            items += found["output"]
            calls = [item for item in found["output"] if item["type"] == "function_call"]
            if found["incomplete_details"] or not calls:
                return await posted(f"{self.resources}/verify", {**record, "response": {**found, "output": items}})
            for call in calls:
                answer = await posted(f"{self.resources}/{call['name']}", json.loads(call["arguments"]))
                items.append({"type": "function_call_output", "call_id": call["call_id"], "output": json.dumps(answer)})


def free_port() -> int:
    """Return a port at which nothing listens now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def serving_agent(agent: AgentServer) -> Iterator[AgentServer]:
    """Run an agent server in a thread."""
    with served([web.post("/run", agent.run)]) as agent.url:
        yield agent


@contextmanager
def serving(server: CounterServer) -> Iterator[CounterServer]:
    """Run a server in a thread."""
    with served([web.post("/{route}", server.answer)]) as server.url:
        yield server


def write(path: Any, *records: dict[str, Any]) -> str:
    """Write records to a file, and return its name."""
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return str(path)
