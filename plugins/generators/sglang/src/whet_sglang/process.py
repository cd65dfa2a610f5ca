"""The process that holds SGLang's engine, on its event loop, behind a gate that is closed while weights arrive.

generate ──> gate ──> SGLang's engine ──> outcomes
receive_weights: close the gate -> drain, abort or pause requests -> load weights, clear the cache -> open the gate
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
from whet.interfaces.generator import OnWeightUpdate
from whet.interfaces.weights import TransferSpec
from whet_generation.completeness import nothing_yet, refuse_mixture
from whet_generation.limits import completion_limit
from whet_sglang.arguments import KEPT_POSITIONS, LOADER
from whet_sglang.extension import HOOKS
from whet_sglang.sampling import LOWEST_TEMPERATURE, completion, sampling_params
from whet_weights.manifest import await_manifests
from whet_weights.whole import failure_among

Outcome = Completion | tuple[str, str]
Outcomes = asyncio.Queue[Outcome | Exception]


@define(eq=False)
class _Asked:
    task: asyncio.Task[None]
    outcomes: Outcomes
    inside: bool = False
    """Whether the request has passed the gate."""


class Process:
    """One engine and the requests that it serves."""

    def __init__(self, rank: Any, *, arguments: Mapping[str, Any], receiver: int, reports: str) -> None:
        from sglang import Engine
        from sglang.srt.plugins.hook_registry import HookRegistry

        self._engine = Engine(**arguments)
        self._manager = self._engine.tokenizer_manager
        if lacking := HOOKS.keys() - HookRegistry._patched:  # SGLang only logs a hook that fails
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
        self._experts: tuple[int, int] | None = None
        """The layers of the model and the experts of a token, if they are recorded."""
        if arguments.get("enable_return_routed_experts"):
            text = config.hf_text_config
            self._experts = (int(text.num_hidden_layers), int(text.num_experts_per_tok))
        self._gate, self._arriving = asyncio.Event(), asyncio.Lock()
        self._gate.set()
        self._asked: dict[str, _Asked] = {}
        self._broken = ""
        """Why the weights are a mixture and must not be used. Empty: the weights are whole."""
        self._spoilt = 0
        """How many weight syncs have left a mixture of weights to running requests."""
        self._released: set[str] = set()
        """Kinds of memory that are freed, by SGLang's names."""

    def leavings(self) -> list[str]:
        """Return the shared memory files that SGLang leaves behind. SGLang always ends by being killed."""
        return [str(file) for file in Path("/dev/shm").glob(f"sglang_loads_{self._engine.port_args.instance_id}_*")]

    async def generate(self, requests: list[Request]) -> AsyncIterator[list[Outcome]]:
        """Serve requests. Yields outcomes as they arrive; outcomes that arrive together are one list."""
        outcomes: Outcomes = asyncio.Queue()
        for request in requests:
            self._asked[request.id] = _Asked(asyncio.create_task(self._serve(request, outcomes)), outcomes)
        mine = {request.id: self._asked[request.id].task for request in requests}
        try:
            left = len(requests)
            while left:
                done = await _all_there_is(outcomes)
                left -= len(done)
                yield done
        finally:
            for id_, task in mine.items():
                task.cancel()
                self._forget(id_, outcomes)

    async def abort(self, ids: list[str]) -> None:
        """End requests early: waiting requests at once, running requests at their next token."""
        for id_ in ids:
            asked = self._asked.get(id_)
            if asked is not None and not asked.inside:
                del self._asked[id_]
                asked.outcomes.put_nowait(nothing_yet(id_))
                asked.task.cancel()  # a task that has not begun yet runs no line of `_serve`
        inside = [id_ for id_ in ids if id_ in self._asked and self._asked[id_].inside]
        await asyncio.gather(*map(self._abort, inside))

    async def receive_weights(self, spec: TransferSpec, version: int, on_weight_update: OnWeightUpdate) -> None:
        """Take the weights of a weight sync.

        If it is refused before the first tensor is loaded, the old weights stay in use. If it fails half way, as one by
        `broadcast` and `cuda-ipc` may, running requests fail, and nothing is generated until a sync is complete.
        """
        async with self._arriving:
            self._gate.clear()
            try:
                if spec.transport in ("shared-memory", "disk"):
                    # Running requests continue until the senders are done.
                    await asyncio.to_thread(await_manifests, spec)
                await self._resume(self._released & {"weights"})
                if on_weight_update == "continue":
                    await self._while_all_stand_still(spec, version)
                else:
                    await self._until_all_have_ended(on_weight_update)
                    await self._take(spec, version)
            finally:
                self._admit()

    async def sleep(self) -> None:
        """Free GPU memory. Requests wait until `wake`."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        async with self._arriving:
            self._gate.clear()
            try:
                await self._until_all_have_ended("drain")
                tags = _tags() - self._released
                if tags:  # SGLang ends if it must release the same memory twice
                    await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=sorted(tags)))
                self._released |= tags
            finally:
                self._admit()

    async def wake(self) -> None:
        """Bring the GPU memory back."""
        await self._resume(set(self._released))
        self._admit()

    def _admit(self) -> None:
        """Open the gate, if all memory is in use."""
        if not self._released:
            self._gate.set()

    async def _resume(self, tags: set[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if tags:
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=sorted(tags)))
        self._released -= tags

    def close(self) -> None:
        """Stop the engine's processes."""
        self._engine.shutdown()
        shutil.rmtree(self._reports, ignore_errors=True)

    async def _serve(self, request: Request, outcomes: Outcomes) -> None:
        try:
            outcomes.put_nowait(await self._ask(request))
        except WeightSyncError as error:
            outcomes.put_nowait(error)
        except Exception as error:  # SGLang refuses a request with any kind of exception
            said = str(error) if isinstance(error, WhetError) else f"request {request.id}: SGLang refused it: {error}"
            outcomes.put_nowait((request.id, said))
        finally:
            self._forget(request.id, outcomes)

    def _forget(self, id_: str, outcomes: Outcomes) -> None:
        """Drop a request, unless one of the same name has taken its place."""
        if id_ in self._asked and self._asked[id_].outcomes is outcomes:
            del self._asked[id_]

    async def _ask(self, request: Request) -> Completion:
        limit = completion_limit(request, self._max_length, self._vocab_size, "SGLang", LOWEST_TEMPERATURE)
        while not self._gate.is_set():
            await self._gate.wait()
        if self._broken:
            raise WeightSyncError(
                f"the generator has no weights to use, as the last weight sync failed: {self._broken}"
            )
        self._asked[request.id].inside, spoilt = True, self._spoilt
        output = await self._engine.async_generate(
            input_ids=request.tokens.tolist(),
            sampling_params=sampling_params(request, limit),
            return_logprob=True,
            rid=_name(request.id),
            **({} if self._experts is None else {"return_routed_experts": True}),
        )
        refuse_mixture(request.id, spoilt=self._spoilt != spoilt)
        return completion(request, output, self._experts)

    async def _abort(self, id_: str) -> None:
        """Abort a request that has passed the gate, after the engine has it. An earlier abort would be lost."""
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

    async def _while_all_stand_still(self, spec: TransferSpec, version: int) -> None:
        """Take weights between two tokens of running requests. Their keys and values are computed again afterwards."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        try:
            await self._take(spec, version)
        finally:
            self._spoilt += bool(self._broken)
            await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def _take(self, spec: TransferSpec, version: int) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        broken, self._broken = self._broken, "it ended half way"
        reports = await self._load(spec)
        failure, spoilt = failure_among(reports)
        if failure:
            self._broken = failure if spoilt else broken
            raise WeightSyncError(failure)
        if len(reports) != self._processes or {report["session"] for report in reports} != {spec.session}:
            raise WeightSyncError(f"weight sync {spec.session}: SGLang's {self._processes} processes took {reports}")
        await self._manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        )
        self._broken = ""

    async def _load(self, spec: TransferSpec) -> list[dict[str, Any]]:
        """Load a weight sync in all of SGLang's processes, in one update session of SGLang. Returns their reports."""
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
        order = {"spec": asdict(spec), "receiver": first, "folder": self._folder}
        message = json.dumps({**order, "reports": str(self._reports)})
        payload = MultiprocessingSerializer.serialize([(message, torch.empty(0))])
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * self._processes, load_format=LOADER, flush_cache=True
        )
        _must(spec, *await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
        try:
            _must(spec, *await self._manager.update_weights_from_tensor(update, None))
        finally:
            ended = await self._manager.end_weight_update(EndWeightUpdateReqInput(), None)
        _must(spec, *ended)
        return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(self._reports.glob("*.json"))]


def _tags() -> set[str]:
    """Return the kinds of memory that SGLang can free."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return set(GPU_MEMORY_ALL_TYPES)


def _must(spec: TransferSpec, done: bool, *said: str) -> None:
    """Raise `WeightSyncError` if SGLang reports that it failed. SGLang raises no error itself."""
    if not done:
        raise WeightSyncError(f"weight sync {spec.session}: SGLang {': '.join(said)}")


def _name(id_: str) -> str:
    """Return a request name that is no prefix of another name. SGLang aborts all requests with a prefix."""
    return f"{id_}|"


async def _all_there_is(outcomes: Outcomes) -> list[Outcome]:
    """Wait for outcomes and return all that have arrived. Raises an error that was delivered."""
    found = [await outcomes.get()]
    while not outcomes.empty():
        found.append(outcomes.get_nowait())
    for outcome in found:
        if isinstance(outcome, Exception):
            raise outcome
    return [outcome for outcome in found if not isinstance(outcome, Exception)]
