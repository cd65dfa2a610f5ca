"""What becomes of requests around an engine, with an engine that answers when it is told to."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from whet.data.records import Request, Sampling
from whet_sglang.process import Process


class Engine:
    """Answers every request with one token once `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def async_generate(self, **_: Any) -> dict[str, Any]:
        await self.go.wait()
        versions = [{"start": 0, "version": "default"}]
        said = {"finish_reason": {"type": "length"}, "output_token_logprobs": [(-1.0, 1, None)]}
        return {"output_ids": [1], "meta_info": {**said, "weight_versions": versions}}


def process() -> Any:
    """Return a process whose gate is open, without SGLang."""
    made = object.__new__(Process)
    made._engine, made._gate, made._arriving = Engine(), asyncio.Event(), asyncio.Lock()  # type: ignore[assignment]
    made._gate.set()
    made._asked, made._broken, made._released, made._experts = {}, "", set(), None
    made._max_length, made._vocab_size, made._manager = 100, 100, SimpleNamespace(rid_to_state={})
    return made


@pytest.mark.parametrize("gate", [True, False])
def test_a_request_that_is_aborted_before_its_task_begins_is_answered(gate: bool) -> None:
    async def run() -> tuple[dict[str, str], dict[str, Any]]:
        made, found = process(), dict[str, str]()
        if not gate:
            made._gate.clear()

        async def stream() -> None:
            requests = [Request(id_, np.array([1, 2, 3]), Sampling(max_tokens=1), 0) for id_ in "ab"]
            async for outcomes in made.generate(requests):
                found.update({one.id: one.stop for one in outcomes})

        both = asyncio.gather(stream(), made.abort(["a"]))  # in one iteration of the loop
        await asyncio.sleep(0)
        made._gate.set()
        made._engine.go.set()
        await asyncio.wait_for(both, 20.0)
        return found, made._asked

    found, left = asyncio.run(run())
    assert found == {"a": "abort", "b": "length"}
    assert not left
