"""`whet serve`: a real generator behind the endpoint, as a process that people start and end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from whet.data.records import Completion, Request, Sampling
from whet.errors import ConfigError, WhetError, WorkerLost
from whet.rollout.gate import Gate
from whet.run.run_folder import temporary_run_folder
from whet_endpoint.chat import read_chat
from whet_endpoint.errors import ApiError
from whet_endpoint.requests import Rules
from whet_endpoint.run import RunResponder
from whet_endpoint.serve import Failure, _prepared, serving
from whet_start.small_models import make_model
from whet_testing.fakes import ByteChat, FakeGenerator

pytest.importorskip("whet_hf", reason="whet-hf is not installed")
COMMON = ("rollout.max_tokens=12", "cluster.threads.generator=1")
HELLO = [{"role": "user", "content": "hello"}]


@contextmanager
def command(model: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Start `whet serve` as a process; kill it where the test has not ended it."""
    line = [sys.executable, "-m", "whet", "serve", str(model), *COMMON, *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def printed(process: "subprocess.Popen[str]") -> dict[str, str]:
    """Return the two variables that the command prints when it serves."""
    assert process.stdout is not None
    return dict(process.stdout.readline().strip().split("=", 1) for _ in range(2))


def ask(base_url: str, key: str, path: str, **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(base_url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_every_dialect_until_a_signal_and_leaves_nothing(
    number: signal.Signals, tiny_model_folder: Path, tmp_path: Path
) -> None:
    file, temporary = tmp_path / "address.json", tmp_path / "tmp"
    temporary.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        with command(tiny_model_folder, "--address", str(file)) as process:
            found = printed(process)
            where = found["OPENAI_BASE_URL"], found["OPENAI_API_KEY"]
            chat = ask(*where, "/chat/completions", messages=HELLO, temperature=0, logprobs=True, top_logprobs=2)
            items = ask(*where, "/responses", input=HELLO, temperature=0)
            blocks = ask(*where, "/messages", messages=HELLO, max_tokens=12, temperature=0)
            assert json.loads(file.read_text()) == {"base_url": where[0], "api_key": where[1], "model": "policy"}
            assert file.stat().st_mode & 0o777 == 0o600
            workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
    text = chat["choices"][0]["message"]["content"]
    assert items["output"][-1]["content"][0]["text"] == text == blocks["content"][-1]["text"]
    assert len(chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert process.returncode == 0
    assert errors.splitlines()[-1] == "ended"
    assert "Traceback" not in errors
    assert not file.exists()
    assert not list(temporary.glob("whet-serve-*"))
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("positions", "overrides", "longest"),
    [(257, [], 256), (256, [], 128), (64, ["rollout.max_tokens=9"], 9), (512, ["rollout.max_context=100"], 50)],
)
def test_the_longest_response_leaves_room_for_a_prompt(
    tmp_path: Path, tiny_tokenizer: Any, positions: int, overrides: list[str], longest: int
) -> None:
    model = make_model(tmp_path, tiny_tokenizer, max_positions=positions)
    with temporary_run_folder("serve") as folder:
        assert _prepared(folder, str(model), "hf", overrides, None).config.rollout.max_tokens == longest


def test_a_generator_that_is_lost_for_good_ends_it_with_the_cause() -> None:
    class Broken(FakeGenerator):
        async def generate(self, request: Request) -> Completion:
            raise WorkerLost("generator", 0, "generate", "it died")

    failure = Failure()
    rules = Rules(Sampling(max_tokens=8), fixed=False)
    responder = RunResponder(Broken("x"), ByteChat(), Gate(), rules, 0, 0, None, failed=failure.set)
    with pytest.raises(ApiError, match="cannot answer now"):
        asyncio.run(responder.respond(read_chat({"messages": HELLO}, rules), "x", None))
    with pytest.raises(WhetError, match=r"the generator has failed, so nothing can be served: .*it died"):
        failure.wait()


@pytest.mark.parametrize(
    ("generator", "override", "words"),
    [
        ("no-such-generator", "endpoint.port=0", "generator"),
        ("hf", "rollout.max_tokenz=3", r"rollout\.max_tokenz"),
        ("hf", "endpoint.port=70000", r"endpoint\.port"),
        ("hf", "model.path=/nowhere", r"model\.path"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_starts(
    tiny_model_folder: Path, generator: str, override: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words), serving(str(tiny_model_folder), generator, [override]):
        pass
