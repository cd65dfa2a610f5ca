"""MCP servers: good ones over stdio and HTTP by the official package, and bad ones of every kind."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tool_episodes import call, episode, made, played, result

from whet.config.structure import structure
from whet.errors import ConfigError
from whet.plugins.registry import load_plugins
from whet_env_tools import processes
from whet_env_tools.config import McpConfig, ToolUseConfig
from whet_env_tools.hooks import _problems
from whet_env_tools.processes import ToolsBroken

pytest.importorskip("mcp", reason="the package mcp is not installed")
SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
GOOD = {"correct": 0.0, "calls": 1.0, "wrong_calls": 0.0, "failed_calls": 0.0}


def server(*fault, **settings):
    return {"hand": {"command": [*SERVER, *fault], "call_seconds": 1.0, **settings}}


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_SECONDS", 6.0)


def test_the_tools_of_a_server_are_the_model_s(tmp_path, no_orphans):
    environment = made(tmp_path, mcp=server(only=["echo", "wrong", "refuse", "picture", "long"], prefix="my_"))
    assert '"name": "my_echo", "description": "Return a text."' in environment.tasks("test")[0].prompt[0].text
    assert '"my_crash"' not in environment.tasks("test")[0].prompt[0].text
    texts = [call("my_echo", text="ä\n"), call("my_wrong"), call("my_refuse"), call("my_picture"), call("my_long")]
    rewards, results = played(environment, *texts, "no")
    assert results[0] == result("ä")
    assert "no such city" in results[1]
    assert "unknown parameter" in results[2]
    assert "[image that cannot be shown as text]" in results[3]
    assert "characters left out" in results[4]
    assert rewards == {"correct": 0.0, "calls": 5.0, "wrong_calls": 2.0, "failed_calls": 0.0}


@pytest.mark.parametrize("code", [-32002, -32000, -32001, 408, 7])
def test_an_error_of_any_code_is_the_answer_of_a_server_that_goes_on(tmp_path, code):
    rewards, results = played(
        made(tmp_path, mcp=server(each_episode=True)), call("count"), call("refuse", code=code), call("count"), "no"
    )
    assert "unknown parameter" in results[1]
    assert results[2] == result("3")
    assert rewards == {"correct": 0.0, "calls": 3.0, "wrong_calls": 1.0, "failed_calls": 0.0}


FAULTS = {
    "freeze": "did not answer within 0.5 s, and then it does not answer",
    "crash": "Connection closed",
    "eat": "",
    "babble": "did not answer within 0.5 s",
    "stranger": "did not answer within 0.5 s",
    "shapeless": "valid",
    "endless": "",
    "chatter": "did not answer within 0.5 s",
}


@pytest.mark.slow
def test_a_bad_server_is_named_started_again_and_counted_and_the_run_goes_on(tmp_path, short_grace, no_orphans):
    environment = made(tmp_path, mcp=server(memory_mib=512, call_seconds=0.5))

    async def all_faults():
        for name, words in FAULTS.items():
            begin = time.monotonic()
            rewards, results = await episode(environment, call(name), call("echo", text="again"), "no")
            assert results[0].startswith(result(f"The call of {name} failed: ").split("\n</")[0].rstrip())
            assert words in results[0], name
            assert results[1] == result("again"), name
            assert rewards == {"correct": 0.0, "calls": 2.0, "wrong_calls": 0.0, "failed_calls": 1.0}, name
            assert time.monotonic() - begin < 60, name
        return await episode(environment, call("flood"), "no")

    try:
        assert asyncio.run(all_faults()) == (GOOD, [result("flooded")])
    finally:
        environment.close()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("die", "a server that does not like to start"),
        ("hang", "it was not ready within 1.5 s"),
        ("version", "nsupported protocol version"),
        ("shapeless", "name"),
        ("pages", "more than 512 tools|not ready"),
        ("absent", "No such file"),
    ],
)
def test_a_server_that_cannot_be_used_is_named_when_the_run_begins(tmp_path, fault, words, no_orphans):
    one = server(fault, start_seconds=1.5 if fault == "hang" else 20.0)
    if fault == "absent":
        one["hand"]["command"] = ["/absent/server"]
    with pytest.raises(ToolsBroken, match=rf"(?s)the MCP server 'hand' cannot be started: .*({words})"):
        made(tmp_path, mcp=one)


def test_names_that_models_cannot_use_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"the name '../../etc'"):
        made(tmp_path, mcp=server("names"))
    with pytest.raises(ConfigError, match="has no tool 'ecko', which `only` names; it has echo, number"):
        made(tmp_path, mcp=server(only=["ecko"]))


def test_a_killed_server_is_started_again(tmp_path):
    environment = made(tmp_path, mcp=server())

    async def killed():
        found = []
        for _ in range(2):
            _, results = await episode(environment, call("number"), "no")
            found.append(int(results[0].split("\n")[1]))
            os.kill(found[-1], 9)
        return found

    try:
        assert len(set(asyncio.run(killed()))) == 2
    finally:
        environment.close()


def test_episodes_share_a_server_or_have_one_each(tmp_path, no_orphans):
    async def counted(environment):
        first = await episode(environment, call("count"), call("count"), "no")
        second = await episode(environment, call("count"), "no")
        return [text.split("\n")[1] for _, results in (first, second) for text in results]

    for each, wanted in ((False, ["1", "2", "3"]), (True, ["1", "2", "1"])):
        environment = made(tmp_path, mcp=server(each_episode=each))
        try:
            assert asyncio.run(counted(environment)) == wanted
            if each:
                with pytest.raises(ToolsBroken, match=r"the MCP server 'hand' was lost in a call of 'crash'"):
                    asyncio.run(episode(environment, call("crash"), "no"))
        finally:
            environment.close()


REAL = """
import sys
try:
    from mcp.server import MCPServer as Server  # version 2
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server

server = Server("real")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

if sys.argv[1] == "stdio":
    server.run()
else:
    import uvicorn

    app = server.streamable_http_app()

    async def guarded(scope, receive, send):
        if scope["type"] == "http" and dict(scope["headers"]).get(b"authorization") != b"Bearer sesame":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})
            return
        await app(scope, receive, send)

    uvicorn.run(guarded, fd=int(sys.argv[2]), log_level="error")
"""


@pytest.mark.slow
def test_servers_of_the_official_package_work_over_stdio_and_http(tmp_path, monkeypatch, no_orphans):
    (tmp_path / "real.py").write_text(REAL)
    monkeypatch.setenv("OUR_TOKEN", "sesame")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, str(tmp_path / "real.py"), "http", str(listener.fileno())]
        http = subprocess.Popen(command, pass_fds=[listener.fileno()])
    try:
        web = {"url": f"http://127.0.0.1:{port}/mcp", "token_variable": "OUR_TOKEN", "prefix": "web_"}
        local = {"command": [sys.executable, str(tmp_path / "real.py"), "stdio"]}
        environment = made(tmp_path, mcp={"local": local, "web": web})
        both = call("add", a=40, b=2) + call("web_add", a=1, b=2)
        rewards, results = played(environment, both, call("web_add", a="x", b=2), r"\boxed{42}")
        assert results[0] == result("42", "3")
        assert "valid integer" in results[1]
        assert rewards == {"correct": 1.0, "calls": 3.0, "wrong_calls": 1.0, "failed_calls": 0.0}
        monkeypatch.setenv("OUR_TOKEN", "wrong")
        with pytest.raises(ToolsBroken, match="the MCP server 'web' cannot be started"):
            made(tmp_path, mcp={"web": web})
    finally:
        http.terminate()
        http.wait()
    with pytest.raises(ToolsBroken, match="the MCP server 'web' cannot be started"):
        made(tmp_path, mcp={"web": web})


@pytest.mark.slow
def test_a_bad_server_over_http_is_named_and_counted_and_the_run_goes_on(tmp_path, short_grace, no_orphans):
    program = str(Path(__file__).with_name("http_server.py"))
    http = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        url = f"http://127.0.0.1:{int(http.stdout.readline())}/mcp"
        environment = made(tmp_path, mcp={"web": {"url": url, "call_seconds": 0.5, "memory_mib": 512}})

        async def all_faults():
            for name in ("hang", "garbage", "fail", "drop", "endless"):
                begin = time.monotonic()
                rewards, results = await episode(environment, call(name), call("echo"), "no")
                assert f"The call of {name} failed: " in results[0] or rewards["wrong_calls"] == 1.0, results
                assert "start" in results[1], name
                assert time.monotonic() - begin < 60, name

        try:
            asyncio.run(all_faults())
        finally:
            environment.close()
    finally:
        http.kill()
        http.wait()


def test_secrets_reach_only_the_server_that_names_them(tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET", "s")
    program = (
        "import os, sys; sys.argv.append(''); "
        f"source = open({SERVER[1]!r}).read().replace('str(os.getpid())', 'repr(os.environ.get(\"A_SECRET\"))'); "
        "exec(source)"
    )
    for variables, wanted in (([], "None"), (["A_SECRET"], "'s'")):
        one = {"hand": {"command": [sys.executable, "-c", program], "variables": variables}}
        assert played(made(tmp_path, mcp=one), call("number"), "no")[1] == [result(wanted)]


def test_check_says_what_a_server_lacks(monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    servers = {"a": {"command": ["absent-program"]}, "b": {"url": "http://x/", "token_variable": "NOT_SET"}}
    config = structure({"dataset": "x.jsonl", "mcp": servers}, ToolUseConfig, load_plugins())
    assert [str(problem) for problem in _problems("environments.0", config)] == [
        "environments.0.mcp.a.command: there is no program 'absent-program'",
        "environments.0.mcp.b: names the environment variable NOT_SET, which is not set",
    ]
    for document, words in (
        ({}, "neither of command and url"),
        ({"command": ["x"], "url": "http://x"}, "both of command and url"),
        ({"url": "ftp://x"}, "begins with http"),
    ):
        with pytest.raises(ConfigError, match=words):
            structure(document, McpConfig, load_plugins())
