"""The server against those who should not get in, ask too much, or ask wrongly."""

import asyncio
import contextlib
import gzip
import json
import logging
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import pytest

from whet.config.sections import EndpointSection
from whet.data.records import Completion, Progress, Sampling
from whet.errors import WhetError
from whet.interfaces.environment import Address
from whet_endpoint.choices import Choice
from whet_endpoint.listener import Listener
from whet_endpoint.requests import ApiRequest, Rules
from whet_endpoint.session import Listen
from whet_testing.fakes import ByteChat


class Says:
    """A responder that always says the same."""

    rules = Rules(Sampling(max_tokens=8), fixed=False)

    def __init__(self, text: str) -> None:
        self._text = text
        self.asked: list[ApiRequest] = []

    chat = ByteChat()

    async def respond(self, request: ApiRequest, name: str, listen: Listen | None) -> list[Choice]:
        self.asked.append(request)
        tokens = ByteChat().encode(self._text)
        made = Completion(name, tokens, -np.ones(len(tokens), np.float32), "stop", ((0, 1), (2, 2)))
        return [Choice(np.arange(3), made, self._text)]


Try = Callable[[Address, Any], Awaitable[Any]]


def with_server(check: Try, responder: Any = None, **section: Any) -> Listener:
    listener = Listener(EndpointSection(**section))

    async def run() -> None:
        async with listener.open(responder or Says("yes"), tuple) as address, aiohttp.ClientSession() as session:
            await check(address, session)

    asyncio.run(run())
    return listener


@contextlib.asynccontextmanager
async def post(address: Address, session: Any, body: Any, path: str = "/chat/completions") -> AsyncIterator[Any]:
    headers = {"Authorization": f"Bearer {address.api_key}"}
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with session.post(address.base_url + path, data=data, headers=headers) as response:
        yield response


ASKED = {"messages": [{"role": "user", "content": "hello"}]}


def test_it_listens_on_the_loopback_alone() -> None:
    async def check(address: Address, session: Any) -> None:
        assert address.base_url.startswith("http://127.0.0.1:")
        assert address.api_key not in repr(address)

    with_server(check)


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer 0.", "Bearer 0.x", "Bearer 9.x", "Bearer .", "Basic {key}", "{key}",
     "Bearer {key}x", "Bearer \xff"],
)  # fmt: skip
def test_without_the_key_nothing_is_answered_and_no_body_is_read(header: str) -> None:
    responder = Says("yes")

    async def check(address: Address, session: Any) -> None:
        headers = {"Authorization": header.format(key=address.api_key)} if header else {}
        for method, path in (("post", "/chat/completions"), ("get", "/models"), ("get", "/../../etc/passwd")):
            async with session.request(method, address.base_url + path, data=b"{", headers=headers) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"

    counts = with_server(check, responder).counts
    assert (responder.asked, counts) == ([], {"requests": 3, "refused with 401": 3})


def test_keys_stand_for_their_own_line_and_for_nothing_once_it_is_closed() -> None:
    listener = Listener(EndpointSection())

    async def run() -> None:
        async with aiohttp.ClientSession() as session, listener.open(Says("a"), tuple) as first:
            async with listener.open(Says("b"), tuple) as second:
                assert first.base_url == second.base_url
                assert first.api_key != second.api_key
                for address, text in ((first, "a"), (second, "b")):
                    async with post(address, session, ASKED) as response:
                        assert (await response.json())["choices"][0]["message"]["content"] == text
            async with post(second, session, ASKED) as response:
                assert response.status == 401
        with pytest.raises(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, post(first, session, ASKED):
                pass

    asyncio.run(run())


def test_models_are_listed_and_other_places_are_not_there() -> None:
    async def check(address: Address, session: Any) -> None:
        headers = {"Authorization": f"bearer {address.api_key}"}
        for path, status in (
            ("/models", 200),
            ("/models/policy", 200),
            ("/models/x", 404),
            ("/%2e%2e/etc/passwd", 404),
        ):
            async with session.get(address.base_url + path, headers=headers) as response:
                assert response.status == status, path
        async with session.get(address.base_url + "/models", headers=headers) as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["policy"]
        async with session.get(address.base_url + "/chat/completions", headers=headers) as response:
            assert response.status == 405

    with_server(check)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"messages": ' + b"9" * 5000 + b"}", 400),
        (b"[]", 400),
        (gzip.compress(b"[" * 1_000_000), 400),
        (b"x" * 5001, 413),
    ],
)
def test_bodies_that_cannot_be_read_are_refused(body: bytes, status: int) -> None:
    async def check(address: Address, session: Any) -> None:
        async with post(address, session, body) as response:
            assert response.status == (413 if len(body) > 5000 else status)
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        async with post(address, session, ASKED) as response:
            assert response.status == 200

    with_server(check, max_body=5000)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
def test_a_compressed_body_is_not_unpacked(encoding: str) -> None:
    bomb = gzip.compress(b" " * (256 << 20))

    async def check(address: Address, session: Any) -> None:
        headers = {"Authorization": f"Bearer {address.api_key}", "Content-Encoding": encoding}
        tracemalloc.start()
        try:
            async with session.post(address.base_url + "/chat/completions", data=bomb, headers=headers) as response:
                assert response.status == 400
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()

    with_server(check)


def test_a_body_of_very_many_values_is_refused_before_it_is_read() -> None:
    body = b'{"messages":[' + b"[]," * 2_000_000 + b"0]}"

    async def check(address: Address, session: Any) -> None:
        tracemalloc.start()
        try:
            async with post(address, session, body) as response:
                assert response.status == 400
                assert "4,000,002 values, wanted at most 1,048,576" in (await response.json())["error"]["message"]
            assert tracemalloc.get_traced_memory()[1] < 6 * len(body)
        finally:
            tracemalloc.stop()

    with_server(check)


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it_with_a_key() -> None:
    async def check(address: Address, session: Any) -> None:
        url, waits = address.base_url + "/chat/completions", aiohttp.ClientTimeout(20)
        for key, status in ((address.api_key, 200), ("none", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(url, json=ASKED, headers=headers, expect100=True, timeout=waits) as response:
                assert response.status == status

    with_server(check)


def test_a_body_of_unknown_length_is_bounded_too() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 1000

    async def check(address: Address, session: Any) -> None:
        headers = {"Authorization": f"Bearer {address.api_key}"}
        url = address.base_url + "/chat/completions"
        with contextlib.suppress(aiohttp.ClientError):  # it may hang up before all is sent
            async with session.post(url, data=endless(), headers=headers) as response:
                assert response.status == 413
        async with post(address, session, ASKED) as response:
            assert response.status == 200

    assert with_server(check, max_body=5000).counts["refused with 413"] == 1


def test_too_long_headers_are_refused() -> None:
    async def check(address: Address, session: Any) -> None:
        async with session.get(address.base_url + "/models", headers={"X-Long": "x" * 100_000}) as response:
            assert response.status == 400

    with_server(check)


def test_connections_are_bounded() -> None:
    async def check(address: Address, session: Any) -> None:
        port = int(address.base_url.split(":")[2].split("/")[0])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await asyncio.sleep(0.05)
        async with post(address, session, ASKED) as response:
            assert response.status == 503
        held[0][1].close()
        await asyncio.sleep(0.05)
        async with post(address, session, ASKED) as response:
            assert response.status == 200
        for _, writer in held[1:]:
            writer.close()

    assert with_server(check, max_connections=3).counts["connections refused"] == 1


def test_a_stream_is_events_that_add_up_to_the_reply() -> None:
    async def check(address: Address, session: Any) -> None:
        body = {**ASKED, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        async with post(address, session, body) as response:
            assert response.content_type == "text/event-stream"
            lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
        *chunks, done = lines
        begun, said, ended, usage = map(json.loads, chunks)
        assert done == "[DONE]"
        assert {chunk["object"] for chunk in (said, ended, usage)} == {"chat.completion.chunk"}
        assert (said["choices"][0]["delta"]["content"], said["choices"][0]["finish_reason"]) == ("yes", None)
        assert begun["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert (ended["prompt_token_ids"], said["choices"][0]["token_ids"]) == ([0, 1, 2], list(b"yes"))
        assert (ended["choices"][0]["delta"], ended["choices"][0]["finish_reason"]) == ({}, "stop")
        assert ended["choices"][0]["weight_versions"] == [[0, 1], [2, 2]]
        assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 6)
        async with post(address, session, {"prompt": "a", "stream": True}, "/completions") as response:
            first = json.loads((await response.text()).split("\n\n")[0].removeprefix("data: "))
        assert (first["object"], first["choices"][0]["text"]) == ("text_completion", "yes")

    with_server(check)


def test_nothing_of_a_request_is_logged(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    async def check(address: Address, session: Any) -> None:
        for body in (ASKED, b"{secret-word", {"secret-word": 1}):
            async with post(address, session, body) as response:
                await response.read()
        port = int(address.base_url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"secret-word not HTTP\r\n\r\n")
        assert b"400" in await reader.read(100)
        writer.close()

    with caplog.at_level(logging.DEBUG):
        with_server(check)
    captured = capsys.readouterr()
    seen = caplog.text + captured.out + captured.err
    assert "secret-word" not in seen
    assert "chat/completions" not in seen.replace("POST", "")


class Breaks(Says):
    """A responder that reports some tokens, and then fails inside."""

    def __init__(self, told: bytes) -> None:
        super().__init__("yes")
        self._told = told

    async def respond(self, request: ApiRequest, name: str, listen: Listen | None) -> list[Choice]:
        if listen is not None and self._told:
            tokens, none = np.frombuffer(self._told, np.uint8).astype(np.int64), np.zeros((len(self._told), 0))
            listen(0, Progress(name, 0, tokens, -np.ones(len(tokens), np.float32), none.astype(np.int64), none))
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("told", [b"", b"ye"])
@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/chat/completions", ASKED, "server_error"),
        ("/completions", {"prompt": "a"}, "server_error"),
        ("/responses", {"input": "a"}, "response.failed"),
        ("/messages", {**ASKED, "max_tokens": 9}, "api_error"),
    ],
)
def test_a_failure_inside_ends_a_stream_and_is_logged_once(
    path: str, body: Any, last: str, told: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(address: Address, session: Any) -> None:
        async with asyncio.timeout(20), post(address, session, {**body, "stream": True}, path) as response:
            said = await response.text()
        assert response.status == (200 if told else 500)
        if told:
            assert last in said.rstrip("\n").split("\n\n")[-1]
        assert "no response could be made" in said
        assert "No space" not in said
        assert address.api_key not in caplog.text

    with_server(check, Breaks(told))
    (record,) = [record for record in caplog.records if record.name.startswith("whet")]
    assert "OSError: [Errno 28] No space left on device" in record.getMessage()


def test_a_port_that_is_taken_is_said_so() -> None:
    async def check(address: Address, session: Any) -> None:
        port = int(address.base_url.split(":")[2].split("/")[0])
        with pytest.raises(WhetError, match=rf"endpoint\.port {port} cannot be listened at.*port 0"):
            async with Listener(EndpointSection(port=port)).open(Says("x"), tuple):
                pass

    with_server(check)


def test_a_body_that_comes_after_the_key_has_gone_is_not_answered() -> None:
    listener, late = Listener(EndpointSection()), Says("late")

    async def run() -> tuple[int, Any]:
        async with listener.open(Says("yes"), tuple), aiohttp.ClientSession() as session:
            rest = asyncio.Event()

            async def slowly() -> AsyncIterator[bytes]:
                yield b"{"
                await rest.wait()
                yield json.dumps(ASKED).encode()[1:]

            async with listener.open(late, tuple) as address:
                headers = {"Authorization": f"Bearer {address.api_key}"}
                asking = asyncio.create_task(
                    session.post(address.base_url + "/chat/completions", data=slowly(), headers=headers)
                )
                while not listener.counts["requests"]:
                    await asyncio.sleep(0.01)
            rest.set()
            async with await asking as response:
                return response.status, await response.json()

    status, said = asyncio.run(run())
    assert (status, said["error"]["code"], late.asked) == (401, "invalid_api_key", [])


@contextlib.asynccontextmanager
async def reading_nothing(address: Address, stream: bool) -> AsyncIterator[None]:
    """Ask for a long response, and leave it unread."""
    unread = socket.socket()
    unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    unread.setblocking(False)
    url, loop = urlsplit(address.base_url), asyncio.get_running_loop()
    await loop.sock_connect(unread, (url.hostname, url.port))
    body = json.dumps({**ASKED, "stream": stream, "logprobs": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {address.api_key}\r\n"
    await loop.sock_sendall(unread, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    with unread:
        yield


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)


LONG = "x" * 60_000


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_nothing_ends_with_its_key(stream: bool) -> None:
    listener = Listener(EndpointSection(max_connections=1))

    async def run() -> None:
        async with listener.open(Says("yes"), tuple) as address, AsyncExitStack() as reading:
            async with listener.open(Says(LONG), tuple) as other:
                await reading.enter_async_context(reading_nothing(other, stream))
                await until(lambda: any(one.writing_paused for one in connections(listener)))
            await until(lambda: not connections(listener))
            async with aiohttp.ClientSession() as session, post(address, session, ASKED) as response:
                assert response.status == 200

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_may_not_wait_for_ever_before_it_reads_on(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet_endpoint.server.SEND_SECONDS", 0.2)
    listener = Listener(EndpointSection(max_connections=1))

    async def run() -> None:
        async with listener.open(Says(LONG), tuple) as address, reading_nothing(address, stream):
            await until(lambda: listener.counts["not read"] and not connections(listener))

    asyncio.run(run())
    assert listener.counts == {"requests": 1, "not read": 1}


def connections(listener: Listener) -> Any:
    assert listener._server is not None
    return listener._server._http.connections


def test_a_host_that_is_no_name_is_an_error_in_words() -> None:
    with pytest.raises(WhetError, match=r"a\.\.b"):
        with_server(lambda *_: asyncio.sleep(0), host="a..b")
