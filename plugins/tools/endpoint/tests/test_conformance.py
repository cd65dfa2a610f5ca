"""The contract of an endpoint, through the hook that core asks and the class that the hook names."""

import asyncio
import inspect
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from whet.component import resolve
from whet.config.sections import EndpointSection, RolloutSection
from whet.data.records import Task
from whet.errors import WhetError
from whet.interfaces.endpoint import Endpoints
from whet.plugins.endpoints import HOOK, missing_endpoints
from whet.plugins.registry import load_plugins
from whet.rollout.event_loop import EpisodeLoop
from whet.rollout.gate import Gate
from whet.rollout.recorded import Assignment, RecordedModel
from whet.rollout.routing import Route
from whet.run.run_folder import RunFolder
from whet_testing.contracts.component import ComponentContract
from whet_testing.fakes import ByteChat, FakeGenerator, FakeModel
from whet_testing.playing import make_player


class TestPlugin(ComponentContract):
    hooks = "whet_endpoint.hooks"


@pytest.fixture
def endpoints() -> Endpoints:
    """The endpoints that core builds from the installed plugin."""
    target = load_plugins().targets(HOOK)["whet-endpoint"]
    built = resolve(target)(EndpointSection())
    assert isinstance(built, Endpoints)
    return built


def ask(base_url: str, key: str, **fields: Any) -> Any:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], **fields}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def test_core_finds_it_by_its_hook() -> None:
    registry = load_plugins()
    assert missing_endpoints(registry) == ""
    assert not registry.broken


@pytest.mark.parametrize("method", ["open", "serve"])
def test_its_methods_take_what_core_gives(endpoints: Endpoints, method: str) -> None:
    wanted = list(inspect.signature(getattr(Endpoints, method)).parameters.values())[1:]
    found = inspect.signature(getattr(endpoints, method)).parameters.values()
    assert [(each.name, each.kind) for each in found] == [(each.name, each.kind) for each in wanted]


def test_an_endpoint_of_an_episode_listens_on_the_loopback_and_ends_with_its_context() -> None:
    async def play() -> tuple[Any, Any]:
        model = FakeModel("yes")
        async with model.endpoint() as address:
            said = await asyncio.to_thread(ask, address.base_url, address.api_key)
            with pytest.raises(OSError, match="401"):
                await asyncio.to_thread(ask, address.base_url, "another key")
            with pytest.raises(OSError, match="400"):
                await asyncio.to_thread(ask, address.base_url, address.api_key, temperature=0.1)
        with pytest.raises(OSError, match="refused"):
            await asyncio.to_thread(ask, address.base_url, address.api_key)
        return said, (address, [message.text for message in model.messages])

    said, (address, messages) = asyncio.run(play())
    assert said == "yes"
    assert messages == ["hello", "yes"]
    assert address.base_url.startswith("http://127.0.0.1:")
    assert address.api_key not in repr(address)


def test_each_endpoint_has_its_own_key_and_model_at_one_address(endpoints: Endpoints) -> None:
    def opened(text: str) -> Any:
        player = make_player(FakeGenerator(text))
        assignment = Assignment(Route("any", None, "train"), Task("x"), 0, 0)  # type: ignore[arg-type]
        return endpoints.open(RecordedModel(player, assignment, 0, 0), player.chat, player.sampling, ())

    async def play() -> list[Any]:
        async with opened("one") as one, opened("two") as two:
            assert one.base_url == two.base_url
            assert one.api_key != two.api_key
            return [await asyncio.to_thread(ask, each.base_url, each.api_key) for each in (one, two)]

    assert asyncio.run(play()) == ["one", "two"]


def test_a_failure_of_the_model_ends_the_body_and_is_raised() -> None:
    async def play() -> None:
        async with FakeModel([]).endpoint() as address:
            with pytest.raises(OSError, match="503"):
                await asyncio.to_thread(ask, address.base_url, address.api_key)

    with pytest.raises(AssertionError, match="answer 1 of a script of 0"):
        asyncio.run(play())


@pytest.mark.parametrize("ignore", ["seed", ["messages"]])
def test_parameters_that_cannot_be_ignored_are_refused(endpoints: Endpoints, ignore: Any) -> None:
    async def play() -> None:
        async with FakeModel("yes").endpoint(ignore=ignore):
            pass

    with pytest.raises(WhetError, match=r"model\.endpoint\(ignore="):
        asyncio.run(play())


def test_a_served_run_ends_when_it_is_told_to_and_leaves_no_key(endpoints: Endpoints, tmp_path: Path) -> None:
    loop = EpisodeLoop()
    try:
        close = endpoints.serve(
            FakeGenerator("yes"), ByteChat(), RolloutSection(max_tokens=8), max_context=0, seed=0, gate=Gate(),
            folder=RunFolder(tmp_path), loop=loop,
        )  # fmt: skip
        address = json.loads((tmp_path / "endpoint.json").read_text())
        assert ask(address["base_url"], address["api_key"]) == "yes"
        close()
        close()
        assert not (tmp_path / "endpoint.json").exists()
        with pytest.raises(OSError, match="refused"):
            ask(address["base_url"], address["api_key"])
    finally:
        loop.close()
