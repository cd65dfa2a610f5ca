"""What becomes of requests around an engine, with an engine that answers when it is told to."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import whet_vllm.worker
from whet.data.records import Completion, Request, Sampling
from whet.errors import WeightSyncError
from whet.interfaces.weights import TransferSpec
from whet_vllm.worker import Worker


class Engine:
    """Answers every request once `go` is set, and stands still when it is told to."""

    max_length, vocab_size, has_tokenizer = 100, 100, True

    def __init__(self) -> None:
        self.go, self.began, self.llm = asyncio.Event(), asyncio.Event(), self

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.began.set()
        await self.go.wait()
        yield None

    async def pause_generation(self, mode: str) -> None:
        pass

    async def resume_generation(self) -> None:
        pass


def test_a_request_that_runs_while_a_weight_sync_leaves_a_mixture_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whet_vllm.worker, "sampling_params", lambda *_: None)
    said = Completion("a", np.zeros(1, np.int64), np.zeros(1, np.float32), "length", ((0, 0),))
    monkeypatch.setattr(whet_vllm.worker, "completion", lambda *_: said)
    request, spec = Request("a", np.array([1, 2, 3]), Sampling(max_tokens=1), 0), TransferSpec("broadcast", "", "s", 4)

    async def run() -> None:
        made: Any = object.__new__(Worker)
        made._engine, made._gate, made._inside, made._waiting = Engine(), asyncio.Event(), set(), set()
        made._gate.set()
        made._broken, made._spoilt, made._asleep, made._adapter = "", 0, "", None
        failure = "a weight is missing"

        async def take(*_: Any) -> None:
            made._broken = failure
            if failure:
                raise WeightSyncError(failure)

        def ask() -> Any:
            return made._ask(request, SimpleNamespace(), asyncio.current_task())

        made._take, running = take, asyncio.ensure_future(ask())
        await made._engine.began.wait()
        with pytest.raises(WeightSyncError, match="a weight is missing"):
            await made._change(spec, 4, "continue")
        failure = ""
        await made._change(spec, 4, "continue")
        made._engine.go.set()
        with pytest.raises(WeightSyncError, match="request a: a weight sync failed while it ran"):
            await running
        assert await ask() is said

    asyncio.run(asyncio.wait_for(run(), 20.0))
