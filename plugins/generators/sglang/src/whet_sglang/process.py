"""The process in which SGLang's engine lives, on its event loop: a gate, which is shut while weights arrive.

generate ──> gate ──> SGLang's engine ──> outcomes
receive_weights: shut the gate -> let requests end, stop, or stand still -> load, and forget the cache -> open it
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, define

from whet.data.records import Completion, Request
from whet.errors import WeightSyncError, WhetError
from whet.generation.completeness import nothing_yet
from whet.interfaces.generator import OnWeightUpdate
from whet.interfaces.weights import TransferSpec
from whet.rollout.limits import completion_limit
from whet.weights.manifest import await_manifests
from whet.weights.whole import failure_among
from whet_sglang.arguments import KEPT_POSITIONS, LOADER
from whet_sglang.extension import HOOKS
from whet_sglang.sampling import LOWEST_TEMPERATURE, completion, sampling_params

Outcome = Completion | tuple[str, str]
Outcomes = asyncio.Queue[Outcome | Exception]


@define(eq=False)
class _Asked:
    task: asyncio.Task[None]
    inside: bool = False
    """Whether it has passed the gate."""


class Process:
    """One engine."""

    def __init__(self, rank: Any, *, arguments: Mapping[str, Any], receiver: int, reports: str) -> None:
        from sglang import Engine
        from sglang.srt.plugins.hook_registry import HookRegistry

        self._engine = Engine(**arguments)
        self._manager = self._engine.tokenizer_manager
        if lacking := HOOKS.keys() - HookRegistry._patched:  # what fails there is only logged
            raise WhetError(f"this SGLang cannot be hooked into at {', '.join(sorted(lacking))}; wanted 0.5.23")
        self._folder, self._receiver, self._reports = arguments["model_path"], receiver, Path(reports)
        self._processes = int(arguments["tp_size"])
        config = self._manager.model_config
        self._max_length, self._vocab_size = int(self._manager.max_req_input_len), int(config.vocab_size)
        if self._max_length < (wanted := int(config.context_len) - KEPT_POSITIONS):  # else it ends completions early
            raise WhetError(
                f"the KV cache has room for {self._max_length} tokens, and a sequence may have {wanted}; raise "
                "generator.cache_gib, or lower generator.max_context"
            )
        self._gate, self._arriving = asyncio.Event(), asyncio.Lock()
        self._gate.set()
        self._asked: dict[str, _Asked] = {}
        self._broken = ""
        """Why the weights are a mixture that must not be used; empty: they are whole."""
        self._released: set[str] = set()
        """Kinds of memory that are given back, as SGLang calls them."""

    def leavings(self) -> list[str]:
        """Name the shared memory that SGLang leaves behind where it is killed, which is how it ends."""
        return [str(file) for file in Path("/dev/shm").glob(f"sglang_loads_{self._engine.port_args.instance_id}_*")]

    async def generate(self, requests: list[Request]) -> AsyncIterator[list[Outcome]]:
        """Have requests served; yield outcomes as they come, together what has come together."""
        outcomes: Outcomes = asyncio.Queue()
        for request in requests:
            self._asked[request.id] = _Asked(asyncio.create_task(self._serve(request, outcomes)))
        mine = [self._asked[request.id].task for request in requests]
        try:
            left = len(requests)
            while left:
                done = await _all_there_is(outcomes)
                left -= len(done)
                yield done
        finally:
            for task in mine:
                task.cancel()

    async def abort(self, ids: list[str]) -> None:
        """End requests early: those that wait at once, those that run at their next token."""
        for id_ in ids:
            asked = self._asked.get(id_)
            if asked is not None and not asked.inside:
                asked.task.cancel("aborted")
        inside = [id_ for id_ in ids if id_ in self._asked and self._asked[id_].inside]
        await asyncio.gather(*map(self._abort, inside))

    async def receive_weights(self, link: TransferSpec, version: int, on_weight_update: OnWeightUpdate) -> None:
        """Take the weights of a hand-over. What was refused left the old ones in use, or none until whole ones come."""
        async with self._arriving:
            self._gate.clear()
            try:
                if link.transport in ("shared-memory", "disk"):
                    # Those that run need not stand still until the senders are done.
                    await asyncio.to_thread(await_manifests, link)
                await self._resume(self._released & {"weights"})
                if on_weight_update == "continue":
                    await self._while_all_stand_still(link, version)
                else:
                    await self._until_all_have_ended(on_weight_update)
                    await self._take(link, version)
            finally:
                self._admit()

    async def sleep(self) -> None:
        """Give a GPU's memory back. Requests wait until it is there again."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        async with self._arriving:
            self._gate.clear()
            try:
                await self._until_all_have_ended("drain")
                tags = _tags() - self._released
                if tags:  # SGLang ends where it is to release what it has released
                    await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=sorted(tags)))
                self._released |= tags
            finally:
                self._admit()

    async def wake(self) -> None:
        """Take it again."""
        await self._resume(set(self._released))
        self._admit()

    def _admit(self) -> None:
        """Let requests in, where there is memory for them."""
        if not self._released:
            self._gate.set()

    async def _resume(self, tags: set[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if tags:
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=sorted(tags)))
        self._released -= tags

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()
        shutil.rmtree(self._reports, ignore_errors=True)

    async def _serve(self, request: Request, outcomes: Outcomes) -> None:
        try:
            outcomes.put_nowait(await self._ask(request))
        except asyncio.CancelledError as error:
            if error.args == ("aborted",):
                outcomes.put_nowait(nothing_yet(request.id))
            raise
        except WeightSyncError as error:
            outcomes.put_nowait(error)
        except Exception as error:  # SGLang refuses a request by whatever its parts raise
            said = str(error) if isinstance(error, WhetError) else f"request {request.id}: SGLang refused it: {error}"
            outcomes.put_nowait((request.id, said))
        finally:
            self._asked.pop(request.id, None)

    async def _ask(self, request: Request) -> Completion:
        limit = completion_limit(request, self._max_length, self._vocab_size, "SGLang", LOWEST_TEMPERATURE)
        while not self._gate.is_set():
            await self._gate.wait()
        if self._broken:
            raise WeightSyncError(f"the generator has no weights to use, as the last hand-over failed: {self._broken}")
        self._asked[request.id].inside = True
        output = await self._engine.async_generate(
            input_ids=request.tokens.tolist(),
            sampling_params=sampling_params(request, limit),
            return_logprob=True,
            rid=_name(request.id),
        )
        return completion(request, output)

    async def _abort(self, id_: str) -> None:
        """Abort a request that has passed the gate, once its engine has it: an abort that comes first is lost."""
        while (asked := self._asked.get(id_)) is not None and not asked.task.done():
            state = self._manager.rid_to_state.get(_name(id_))
            if state is not None and state.dispatched:
                self._manager.abort_request(_name(id_))
                return
            await asyncio.sleep(0.001)

    async def _until_all_have_ended(self, on_weight_update: OnWeightUpdate) -> None:
        while inside := {id_: asked.task for id_, asked in self._asked.items() if asked.inside}:
            if on_weight_update == "abort":
                await asyncio.gather(*map(self._abort, inside))
            await asyncio.wait(inside.values())

    async def _while_all_stand_still(self, link: TransferSpec, version: int) -> None:
        """Take weights between two tokens of those that run, which are computed again afterwards."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        try:
            await self._take(link, version)
        finally:
            await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def _take(self, link: TransferSpec, version: int) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        broken, self._broken = self._broken, "it ended half way"
        reports = await self._load(link)
        failure, spoilt = failure_among(reports)
        if failure:
            self._broken = failure if spoilt else broken
            raise WeightSyncError(failure)
        if len(reports) != self._processes or {report["session"] for report in reports} != {link.session}:
            raise WeightSyncError(f"hand-over {link.session}: SGLang's {self._processes} processes took {reports}")
        await self._manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        )
        self._broken = ""

    async def _load(self, link: TransferSpec) -> list[dict[str, Any]]:
        """Let SGLang's processes take a hand-over, in a session of its own kind; give their reports."""
        import torch
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
            UpdateWeightsFromTensorReqInput,
        )
        from sglang.srt.utils import MultiprocessingSerializer

        shutil.rmtree(self._reports, ignore_errors=True)
        self._reports.mkdir(parents=True)
        first = self._receiver * self._processes
        order = {"link": asdict(link), "receiver": first, "folder": self._folder}
        message = json.dumps({**order, "reports": str(self._reports)})
        payload = MultiprocessingSerializer.serialize([(message, torch.empty(0))])
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * self._processes, load_format=LOADER, flush_cache=True
        )
        _must(link, *await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
        try:
            _must(link, *await self._manager.update_weights_from_tensor(update, None))
        finally:
            ended = await self._manager.end_weight_update(EndWeightUpdateReqInput(), None)
        _must(link, *ended)
        return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(self._reports.glob("*.json"))]


def _tags() -> set[str]:
    """Name the kinds of memory that SGLang can give back."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return set(GPU_MEMORY_ALL_TYPES)


def _must(link: TransferSpec, done: bool, *said: str) -> None:
    """Raise `WeightSyncError` where SGLang says that it did not do what it was asked, of which it raises nothing."""
    if not done:
        raise WeightSyncError(f"hand-over {link.session}: SGLang {': '.join(said)}")


def _name(id_: str) -> str:
    """Name a request so that no name is the beginning of another, for SGLang aborts all that begin so."""
    return f"{id_}|"


async def _all_there_is(outcomes: Outcomes) -> list[Outcome]:
    """Wait for outcomes. Raises what was delivered as an error."""
    found = [await outcomes.get()]
    while not outcomes.empty():
        found.append(outcomes.get_nowait())
    for outcome in found:
        if isinstance(outcome, Exception):
            raise outcome
    return [outcome for outcome in found if not isinstance(outcome, Exception)]
