"""What an engine does not survive, or refuses to begin with, is said in its own words, and nothing of it is left."""

import asyncio
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whet.errors import WorkerError, WorkerLost
from whet_sglang.arguments import ENGINE
from whet_sglang.config import SglangConfig
from whet_sglang.generator import SglangGenerator
from whet_testing.contracts.engine import EngineFailuresContract, Make

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not ENGINE.is_here, reason="SGLang is not installed; `nox -s 'engines(sglang)'` has it"),
    pytest.mark.usefixtures("no_orphans"),
]


class TestSglang(EngineFailuresContract):
    generator = SglangGenerator
    config = SglangConfig
    process, module, name = "sglang::scheduler", "sglang.srt.managers.scheduler", "SGLang"
    hang_seconds = 10.0

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"engine": {"attention_backend": "nonsense"}}, "nonsense"),
            ({"cache_gib": 1e-4}, "the KV cache has room for"),
            ({"engine": {"page_sise": 4}}, "generator.engine.page_sise is no argument of the installed SGLang"),
            (
                {"engine": {"max_prefill_tokens": 8, "mem_fraction_static": 0.1}},
                "is set by `generator.memory_fraction`",
            ),
        ],
        ids=["refused", "no room for one sequence", "no such argument", "set elsewhere"],
    )
    def test_an_engine_that_does_not_start_says_why(self, make: Make, settings: dict[str, Any], said: str) -> None:
        with pytest.raises(WorkerError, match="generator rank 0 failed in start") as raised:
            make(**settings)
        assert said in raised.value.cause
        assert "Traceback" not in raised.value.cause
        assert len(raised.value.cause.splitlines()) < 20

    def test_an_engine_that_is_killed_for_its_memory_while_it_starts_says_so(self, make: Make) -> None:
        def strike() -> None:
            while not (found := self.engine_process()):
                time.sleep(0.05)
            os.kill(found, signal.SIGKILL)  # as the kernel does

        threading.Thread(target=strike, daemon=True).start()
        with pytest.raises(WorkerError, match="generator rank 0 failed in start") as raised:
            make()
        assert "exit code: -9" in raised.value.cause

    @pytest.fixture
    def temporary(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="w") as folder:  # short, as names of sockets must be
            monkeypatch.setenv("TMPDIR", folder)
            yield

    @pytest.mark.usefixtures("temporary")
    def test_an_engine_that_is_killed_is_a_lost_worker(self, make: Make) -> None:
        memory: list[str] = []

        def look(process: int) -> None:
            memory.extend(re.findall(r"/dev/shm/sglang_\S+", Path(f"/proc/{process}/maps").read_text()))

        found, seconds = asyncio.run(self.struck(make(max_batch=2), signal.SIGKILL, look))
        assert isinstance(found, WorkerLost)
        assert "SGLang's engine has died" in found.last_words
        assert "crashed with exit code -9" in found.last_words
        assert seconds < 30
        assert list(Path(os.environ["TMPDIR"]).glob("whet-*/*")) == []
        assert memory, "the trap is there"
        assert not [file for file in memory if Path(file).exists()]
