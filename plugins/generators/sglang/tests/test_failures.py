"""What an engine does not survive, or refuses to begin with, is said in its own words, and nothing of it is left."""

import asyncio
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.cluster.local import LocalCluster
from whet.config.sections import DeadlinesSection
from whet.data.records import Request, Sampling
from whet.errors import WorkerError, WorkerLost
from whet.testing.processes import descendants
from whet.testing.site import make_site
from whet_sglang.arguments import ENGINE
from whet_sglang.config import SglangConfig
from whet_sglang.generator import SglangGenerator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not ENGINE.is_here, reason="SGLang is not installed; `nox -s 'engines(sglang)'` has it"),
    pytest.mark.usefixtures("no_orphans"),
]

Make = Callable[..., SglangGenerator]


@pytest.fixture
def make(tmp_path: Path, tiny_models: Any) -> Iterator[Make]:
    """Start a generator on a worker process of its own."""
    opened: list[Any] = []

    def made(generate_seconds: float = 60.0, **settings: Any) -> SglangGenerator:
        deadlines = evolve(DeadlinesSection(), generate=generate_seconds)
        cluster = LocalCluster(tmp_path / "logs", deadlines=deadlines)
        opened.append(cluster)
        site = make_site(tmp_path, "generator", tiny_models(), cluster.slice("generator", size=1))
        generator = SglangGenerator(SglangConfig(**{"cache_gib": 0.0625, **settings}), site)
        opened.append(generator)
        return generator

    yield made
    for thing in reversed(opened):
        thing.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": {"attention_backend": "nonsense"}}, "nonsense"),
        ({"cache_gib": 1e-4}, "the KV cache has room for"),
        ({"engine": {"page_sise": 4}}, "generator.engine.page_sise is no argument of the installed SGLang"),
        ({"engine": {"max_prefill_tokens": 8, "mem_fraction_static": 0.1}}, "is set by `generator.memory_fraction`"),
    ],
    ids=["refused", "no room for one sequence", "no such argument", "set elsewhere"],
)
def test_an_engine_that_does_not_start_says_why(make: Make, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkerError, match="generator rank 0 failed in start") as raised:
        make(**settings)
    assert said in raised.value.cause
    assert "Traceback" not in raised.value.cause
    assert len(raised.value.cause.splitlines()) < 20


def scheduler() -> int:
    """Find the process of the engine's scheduler; 0: there is none yet."""
    return next((p.pid for p in descendants() if "sglang::scheduler" in p.command), 0)


def test_an_engine_that_is_killed_for_its_memory_while_it_starts_says_so(make: Make) -> None:
    def strike() -> None:
        while not (found := scheduler()):
            time.sleep(0.05)
        os.kill(found, signal.SIGKILL)  # as the kernel does

    threading.Thread(target=strike, daemon=True).start()
    with pytest.raises(WorkerError, match="generator rank 0 failed in start") as raised:
        make()
    assert "exit code: -9" in raised.value.cause


async def struck(
    generator: SglangGenerator, number: signal.Signals, memory: list[str] | None = None
) -> tuple[BaseException, float]:
    """Have the scheduler struck while it serves; give what came of it, and after how many seconds.

    Which shared memory it had goes to `memory`.
    """

    def request(id_: str, most: int) -> Request:
        return Request(id_, np.array([5, 6, 7]), Sampling(max_tokens=most), 0)

    await generator.generate(request("first", 8))
    process = scheduler()
    assert process
    tasks = [asyncio.create_task(generator.generate(request(f"later-{n}", 240))) for n in range(32)]
    await asyncio.sleep(0.1)
    assert not tasks[-1].done()
    if memory is not None:
        memory += re.findall(r"/dev/shm/sglang_\S+", Path(f"/proc/{process}/maps").read_text())
    os.kill(process, number)
    begin = time.monotonic()
    *_, found = await asyncio.gather(*tasks, return_exceptions=True)  # the last is far from its turn
    assert isinstance(found, BaseException), "it was served by an engine that had been struck"
    return found, time.monotonic() - begin


def test_an_engine_that_is_killed_is_a_lost_worker_and_leaves_nothing_behind(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="w") as temporary:  # short, as names of sockets must be
        monkeypatch.setenv("TMPDIR", temporary)
        memory: list[str] = []
        found, seconds = asyncio.run(struck(make(max_batch=2), signal.SIGKILL, memory))
        assert isinstance(found, WorkerLost)
        assert "SGLang's engine has died" in found.last_words
        assert "crashed with exit code -9" in found.last_words
        assert seconds < 30
        assert list(Path(temporary).glob("whet-*/*")) == []
    assert memory, "the trap is there"
    assert not [file for file in memory if Path(file).exists()]


def test_an_engine_that_hangs_is_a_lost_worker_after_its_deadline(make: Make) -> None:
    found, seconds = asyncio.run(struck(make(generate_seconds=10.0, max_batch=2), signal.SIGSTOP))
    assert isinstance(found, WorkerLost)
    assert "generate" in str(found)
    assert 4 < seconds < 60
