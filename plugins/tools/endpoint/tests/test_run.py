"""The endpoint of a run: who may ask, what is kept, and what happens when the model fails."""

import asyncio
import json
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.config.sections import EndpointSection, RolloutSection
from whet.data.files import read_rows
from whet.data.messages import Conversation
from whet.data.records import IntArray
from whet.errors import WorkerLost
from whet.rollout.event_loop import EpisodeLoop
from whet.rollout.gate import Gate
from whet.run.run_folder import RunFolder
from whet_endpoint.endpoints import OpenAIEndpoints
from whet_testing.fakes import ByteChat, FakeGenerator


@pytest.fixture
def loop() -> Iterator[EpisodeLoop]:
    loop = EpisodeLoop()
    yield loop
    loop.close()


class Served:
    """An endpoint of a run that is open."""

    def __init__(
        self, loop: EpisodeLoop, folder: Path, generator: Any, max_context: int, section: EndpointSection,
        chat: ByteChat,
    ) -> None:  # fmt: skip
        self.close = OpenAIEndpoints(section).serve(
            generator, chat, RolloutSection(max_tokens=8), max_context=max_context, seed=0, gate=Gate(),
            folder=RunFolder(folder), loop=loop,
        )  # fmt: skip


def start(
    loop: EpisodeLoop, folder: Path, generator: Any, max_context: int = 0, chat: ByteChat | None = None, **endpoint: Any
) -> Served:
    folder.mkdir(exist_ok=True)
    return Served(loop, folder, generator, max_context, EndpointSection(serve=True, **endpoint), chat or ByteChat())


def ask(folder: Path, **body: Any) -> tuple[int, Any]:
    """Ask as whoever can read the run folder can."""
    address = json.loads((folder / "endpoint.json").read_text())
    body = {"model": address["model"], "messages": [{"role": "user", "content": "hello"}], **body}
    request = urllib.request.Request(
        address["base_url"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {address['api_key']}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_what_is_asked_and_answered_is_kept_as_tokens(tmp_path: Path, loop: EpisodeLoop) -> None:
    generator = FakeGenerator("yes")
    generator.version = 3
    endpoint = start(loop, tmp_path, generator)
    status, reply = ask(tmp_path, temperature=0, top_p=0.9, max_tokens=100, return_token_ids=True)
    endpoint.close()
    (row,) = read_rows(tmp_path / "endpoint.jsonl")
    (choice,) = reply["choices"]
    assert (status, choice["message"]["content"], choice["weight_versions"]) == (200, "yes", [[0, 3]])
    assert row["sampling"] == {"max_tokens": 8, "temperature": 0, "top_p": 0.9, "top_k": 0}
    assert (row["prompt_token_ids"], row["token_ids"]) == (reply["prompt_token_ids"], choice["token_ids"])
    assert row["prompt_token_ids"] == list(b"user: hello\nassistant: ")
    assert (row["weight_versions"], row["stop"], len(row["logprobs"])) == ([[0, 3]], "stop", 4)


def test_its_key_is_for_the_user_alone_and_gone_with_it(tmp_path: Path, loop: EpisodeLoop) -> None:
    endpoint = start(loop, tmp_path, FakeGenerator("yes"))
    file = tmp_path / "endpoint.json"
    key = json.loads(file.read_text())["api_key"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ask(tmp_path)
    ask(tmp_path, tools=[{}])
    endpoint.close()
    endpoint.close()
    assert not file.exists()
    assert not any(key in path.read_text() for path in tmp_path.iterdir())
    opened, closed = read_rows(tmp_path / "journal.jsonl")
    assert (opened["event"], closed["event"]) == ("endpoint opened", "endpoint closed")
    assert (closed["requests"], closed["refused with 400"], closed["recorded"]) == (2, 1, 1)


def test_what_is_kept_is_bounded(tmp_path: Path, loop: EpisodeLoop) -> None:
    endpoint = start(loop, tmp_path, FakeGenerator("yes"), record=1000)
    assert [ask(tmp_path)[0] for _ in range(5)] == [200] * 5
    endpoint.close()
    rows = list(read_rows(tmp_path / "endpoint.jsonl"))
    assert (tmp_path / "endpoint.jsonl").stat().st_size <= 1000
    assert 0 < len(rows) < 5
    assert list(read_rows(tmp_path / "journal.jsonl"))[-1]["left_out"] == 5 - len(rows)
    start(loop, tmp_path, FakeGenerator("yes"), record=0).close()


def test_answers_are_drawn_anew_unless_a_seed_is_given(tmp_path: Path, loop: EpisodeLoop) -> None:
    endpoint = start(loop, tmp_path, FakeGenerator(lambda prompt, rng: str(rng.integers(10**6))))

    def texts(**body: Any) -> list[str]:
        return [choice["message"]["content"] for choice in ask(tmp_path, **body)[1]["choices"]]

    free, seeded = [*texts(), *texts()], [texts(seed=1, n=2), texts(seed=1, n=2), texts(seed=2, n=2)]
    endpoint.close()
    assert free[0] != free[1]
    assert seeded[0] == seeded[1] != seeded[2]
    assert seeded[0][0] != seeded[0][1]


def test_a_prompt_that_leaves_no_room_is_refused(tmp_path: Path, loop: EpisodeLoop) -> None:
    endpoint = start(loop, tmp_path, FakeGenerator("yes"), max_context=10)
    status, reply = ask(tmp_path)
    endpoint.close()
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")


def test_a_model_that_is_gone_is_said_so_and_asked_again_when_it_is_back(tmp_path: Path, loop: EpisodeLoop) -> None:
    class Flaky(FakeGenerator):
        async def generate(self, request: Any) -> Any:
            if not self.requests:
                self.requests.append(request)
                raise WorkerLost("generator", 0, "generate", "it died")
            return evolve(await super().generate(request), versions=((0, np.int64(2)),))

    endpoint = start(loop, tmp_path, Flaky("yes"))
    gone, back = ask(tmp_path), ask(tmp_path)
    endpoint.close()
    assert (gone[0], gone[1]["error"]["code"], back[0]) == (503, "model_failed", 200)


def test_a_response_is_sent_also_where_its_row_cannot_be_written(
    tmp_path: Path, loop: EpisodeLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append = RunFolder.append

    def full(self: RunFolder, name: str, rows: Any) -> None:
        if name == "endpoint.jsonl":
            raise OSError(28, "No space left on device")
        append(self, name, rows)

    monkeypatch.setattr(RunFolder, "append", full)
    endpoint = start(loop, tmp_path, FakeGenerator("yes"))
    assert [ask(tmp_path)[0] for _ in range(2)] == [200, 200]
    endpoint.close()
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("whet_endpoint")]
    assert "No space left on device" in warning
    assert list(read_rows(tmp_path / "journal.jsonl"))[-1]["not_written"] == 2


class Slow(ByteChat):
    """Takes as long for the prompt of a conversation that says `slow` as it is made to."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()

    def prompt(self, conversation: Conversation) -> IntArray:
        if conversation[-1].text == "slow":
            self.began.set()
            assert self.go.wait(20), "another request had to wait for this prompt"
        return super().prompt(conversation)


@pytest.mark.parametrize("ends", [False, True])
def test_a_long_prompt_keeps_no_other_request_and_no_end_waiting(tmp_path: Path, loop: EpisodeLoop, ends: bool) -> None:
    chat = Slow()
    endpoint = start(loop, tmp_path, FakeGenerator("yes"), chat=chat)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, tmp_path, messages=[{"role": "user", "content": "slow"}])
        assert chat.began.wait(20)
        if ends:
            endpoint.close()
            assert slow.result()[0] == 503
            chat.go.set()
        else:
            assert ask(tmp_path)[0] == 200
            chat.go.set()
            assert slow.result()[0] == 200
            endpoint.close()


def test_a_client_on_the_last_thread_of_the_loop_is_answered(tmp_path: Path, loop: EpisodeLoop) -> None:
    endpoint = start(loop, tmp_path, FakeGenerator("yes"))
    loop.call(loop.events.set_default_executor, ThreadPoolExecutor(1))
    assert loop.run(asyncio.wait_for(asyncio.to_thread(ask, tmp_path), 20))[0] == 200
    endpoint.close()
