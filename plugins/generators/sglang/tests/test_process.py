"""What becomes of requests around an engine, with an engine that answers when it is told to."""

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from whet.data.records import Request, Sampling
from whet.errors import WeightSyncError
from whet.interfaces.weights import TransferSpec
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
    made._spoilt, made._processes = 0, 1
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


class Still:
    """Stands still and goes on when it is told to, as SGLang's manager."""

    async def pause_generation(self, _: Any) -> None:
        pass

    async def continue_generation(self, _: Any) -> None:
        pass

    async def update_weight_version(self, _: Any) -> None:
        pass


def test_a_request_that_runs_while_a_weight_sync_leaves_a_mixture_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    records = ModuleType("sglang.srt.managers.io_struct")
    for kind in ("ContinueGeneration", "PauseGeneration", "ResumeMemoryOccupation", "UpdateWeightVersion"):
        setattr(records, f"{kind}ReqInput", SimpleNamespace)
    monkeypatch.setitem(sys.modules, records.__name__, records)
    made, spec = process(), TransferSpec("broadcast", "", "s", 4)
    made._manager, reports = Still(), [{"session": "s", "failure": "a weight is missing", "spoilt": True}]

    async def load(_: TransferSpec) -> Any:
        return reports

    made._load = load

    async def ask() -> None:
        async for _ in made.generate([Request("a", np.array([1, 2, 3]), Sampling(max_tokens=1), 0)]):
            pass

    async def run() -> None:
        running = asyncio.ensure_future(ask())
        while not ("a" in made._asked and made._asked["a"].inside):
            await asyncio.sleep(0)
        with pytest.raises(WeightSyncError, match="a weight is missing"):
            await made.receive_weights(spec, 4, "continue")
        reports[0] = {"session": "s", "failure": "", "spoilt": False}
        await made.receive_weights(spec, 4, "continue")
        made._engine.go.set()
        with pytest.raises(WeightSyncError, match="request a: a weight sync failed while it ran"):
            await running
        await ask()

    asyncio.run(asyncio.wait_for(run(), 20.0))
