"""The worker: holds an engine, passes requests to it as they arrive, and loads new weights.

    the worker's loop   generate, abort, receive_weights      messages: all outcomes that have arrived
        |  ^
        v  |
    the engine's loop   AsyncLLM, one task for each request   a gate, closed while weights arrive

So the engine stays on one event loop, also if different loops call the worker.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from attrs import asdict

from whet.component import AdapterInfo
from whet.data.records import Completion, Progress, Request
from whet.errors import WeightSyncError, WhetError
from whet.interfaces.generator import OnWeightUpdate
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import WorkerRank
from whet.runtime.worker_process import give_up
from whet_generation.completeness import nothing_yet, refuse_mixture
from whet_generation.limits import completion_limit
from whet_vllm import adapter
from whet_vllm.arguments import ENGINE
from whet_vllm.engine import Engine
from whet_vllm.sampling import LOWEST_TEMPERATURE, completion, progress, sampling_params
from whet_weights.manifest import await_manifests
from whet_weights.transfer import receive
from whet_weights.whole import failure_among, stored_shapes

log = logging.getLogger(__name__)
T = TypeVar("T")
Outcome = Completion | Progress | tuple[str, str]
"""A completion, or tokens of a running one, or (id, why the request cannot be served)."""
POLL_SECONDS = 0.5
PAUSES: dict[OnWeightUpdate, str] = {"drain": "wait", "continue": "keep", "abort": "abort"}


class Worker:
    """One engine and the requests that it serves."""

    def __init__(
        self,
        rank: WorkerRank,
        *,
        arguments: Mapping[str, Mapping[str, Any]],
        engine: Mapping[str, Any],
        scratch: str,
    ) -> None:
        ENGINE.refuse(engine)
        self._rank, self._on_gpu = rank, rank.device != "cpu"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="whet-vllm", daemon=True)
        self._thread.start()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The last task of each id: a request may be sent again before the task that was given up has ended."""
        self._waiting: set[asyncio.Task[None]] = set()
        """Tasks of requests that wait at the gate."""
        self._inside: set[asyncio.Task[None]] = set()
        """Tasks of requests that have passed the gate."""
        self._adapter: Any = None
        """vLLM's name of the adapter that all requests use. None: no adapter has come."""
        self._broken = ""
        """Why the weights are a mixture and must not be used. Empty: the weights are whole."""
        self._spoilt = 0
        """How many weight syncs have left a mixture of weights to running requests."""
        self._asleep: Literal["", "wholly", "but for weights"] = ""
        """Which memory is freed: none, all, or all except the weights."""
        try:
            self._there(self._begin(arguments["cuda" if self._on_gpu else "cpu"], Path(scratch))).result()
        except BaseException:
            self._end_loop()
            raise

    async def generate(self, requests: list[Request]) -> AsyncIterator[list[Outcome]]:
        """Serve requests. Yields outcomes as they arrive; outcomes that arrive together are one list."""
        mailbox = _Mailbox(asyncio.get_running_loop())
        self._loop.call_soon_threadsafe(self._admit, requests, mailbox)
        try:
            left = len(requests)
            while left:
                done = await mailbox.take()
                left -= sum(not isinstance(outcome, Progress) for outcome in done)
                yield done
        finally:
            with suppress(RuntimeError):  # the worker was closed meanwhile, and all its requests with it
                self._loop.call_soon_threadsafe(self._cancel, mailbox)

    async def abort(self, ids: list[str]) -> AsyncIterator[None]:
        """End requests early with `stop="abort"`: waiting requests at once, running requests at their next token."""
        await asyncio.wrap_future(self._there(self._abort(ids)))
        yield None

    async def receive_weights(self, spec: TransferSpec, version: int, on_weight_update: OnWeightUpdate) -> None:
        """Take the weights of a weight sync.

        If it is refused before the first tensor is loaded, the old weights stay in use. If it fails half way, as one by
        `broadcast` and `cuda-ipc` may, running requests fail, and nothing is generated until a sync is complete.
        """
        await asyncio.wrap_future(self._there(self._receive(spec, version, on_weight_update)))

    def sleep(self) -> int | None:
        """Free GPU memory and move weights to the host. Returns the freed bytes; None on a CPU, which cannot sleep."""
        if not self._on_gpu:
            return None
        return self._there(self._while_it_lives(self._sleep())).result()

    def wake(self) -> None:
        """Bring weights and cache back."""
        if self._on_gpu:
            self._there(self._while_it_lives(self._wake())).result()

    def close(self) -> None:
        """Stop the engine's processes."""
        self._there(self._finish()).result()
        self._end_loop()

    def _there(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine on the engine's loop. Returns its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _begin(self, arguments: Mapping[str, Any], scratch: Path) -> None:
        self._gate, self._arriving = asyncio.Event(), asyncio.Lock()
        self._gate.set()
        self._engine = Engine(self._rank, arguments, scratch)
        await self._engine.llm.get_supported_tasks()  # cached from now on, so that requests need not wait for it

    async def _finish(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._engine.close()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _admit(self, requests: list[Request], mailbox: "_Mailbox") -> None:
        for request in requests:
            task = self._tasks[request.id] = self._loop.create_task(self._serve(request, mailbox))
            mailbox.tasks.append(task)

    def _cancel(self, mailbox: "_Mailbox") -> None:
        for task in mailbox.tasks:
            task.cancel()

    async def _abort(self, ids: list[str]) -> None:
        asked = {id_: self._tasks[id_] for id_ in ids if id_ in self._tasks}
        for task in self._waiting.intersection(asked.values()):
            task.cancel("aborted")
        await self._engine.llm.abort([id_ for id_, task in asked.items() if task in self._inside])

    async def _serve(self, request: Request, mailbox: "_Mailbox") -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            mailbox.put(await self._ask(request, mailbox, task))
        except asyncio.CancelledError as error:
            if error.args == ("aborted",):
                mailbox.put(nothing_yet(request.id))
            raise
        except Exception as error:  # the edge of this task: the caller must get the error
            mailbox.put(self._refusal(request, error))
        finally:
            self._inside.discard(task)
            if self._tasks.get(request.id) is task:
                del self._tasks[request.id]

    async def _ask(self, request: Request, mailbox: "_Mailbox", task: "asyncio.Task[None]") -> Completion:
        most, words, strings = self._engine.max_length, self._engine.vocab_size, self._engine.has_tokenizer
        limit = completion_limit(request, most, words, "vLLM", LOWEST_TEMPERATURE, schemas=True, strings=strings)
        self._waiting.add(task)
        try:
            while not self._gate.is_set():
                await self._gate.wait()
        finally:
            self._waiting.discard(task)
        self._inside.add(task)
        if self._broken:
            raise WeightSyncError(
                f"the generator has no weights to use, as the last weight sync failed: {self._broken}"
            )
        prompt = {"type": "token", "prompt_token_ids": request.tokens.tolist()}
        last, reported, spoilt = None, 0, self._spoilt
        params = sampling_params(request, limit)
        async for output in self._engine.llm.generate(prompt, params, request.id, lora_request=self._adapter):
            last = output
            if request.progress is not None and (tokens := progress(request, output, reported)).tokens.size:
                mailbox.put(tokens)
                reported += len(tokens.tokens)
        refuse_mixture(request.id, spoilt=self._spoilt != spoilt)
        return completion(request, last)

    def _refusal(self, request: Request, error: Exception) -> Outcome | Exception:
        """Return the outcome of a failed request: a refusal of this request, or an error for all requests."""
        from vllm.exceptions import VLLMClientError

        if self._engine.llm.errored:
            give_up(self._engine.dead())
            return WhetError(self._engine.dead())
        if isinstance(error, (VLLMClientError, ValueError)):
            return request.id, f"request {request.id}: vLLM refused it: {error}"
        if isinstance(error, WhetError) and not isinstance(error, WeightSyncError):
            return request.id, str(error)
        return error

    async def _receive(self, spec: TransferSpec, version: int, on_weight_update: OnWeightUpdate) -> None:
        async with self._arriving:
            self._gate.clear()
            try:
                await self._while_it_lives(self._change(spec, version, on_weight_update))
            finally:
                self._gate.set()

    async def _while_it_lives(self, steps: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine of the engine. Raise if the engine dies: then vLLM never completes the coroutine."""
        task = asyncio.ensure_future(steps)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # else Python logs its exception
        try:
            while not task.done() and not self._engine.llm.errored:
                await asyncio.wait([task], timeout=POLL_SECONDS)
            if task.done() and not self._engine.llm.errored:
                return task.result()
        finally:
            task.cancel()
        give_up(self._engine.dead())
        raise WhetError(self._engine.dead())

    async def _sleep(self) -> int:
        if self._asleep == "wholly":
            return 0
        before = await self._free_bytes()
        await self._engine.llm.sleep(level=1, mode="wait")
        self._asleep = "wholly"
        return max(0, await self._free_bytes() - before)

    async def _wake(self) -> None:
        if self._asleep and not await self._engine.llm.wake_up():
            raise WhetError("vLLM's engine did not take its memory again when it was woken")
        self._asleep = ""

    async def _free_bytes(self) -> int:
        """Return the free memory of the GPUs of all engine processes, in bytes."""
        return sum(await self._engine.llm.collective_rpc("whet_free_bytes"))

    async def _change(self, spec: TransferSpec, version: int, on_weight_update: OnWeightUpdate) -> None:
        if spec.transport in ("shared-memory", "disk"):
            # Running requests continue until the senders are done.
            await asyncio.to_thread(await_manifests, spec)
        if self._asleep:  # no request runs, and there is no cache to clear
            self._asleep = "but for weights"
            await self._engine.llm.wake_up(tags=["weights"])
            return await self._take(spec, version)
        if on_weight_update == "drain" and self._inside:  # vLLM's own "wait" leaves out what it has preempted
            await asyncio.wait(self._inside)
        await self._engine.llm.pause_generation(mode=PAUSES[on_weight_update])
        try:
            await self._take(spec, version)
        finally:
            self._spoilt += on_weight_update == "continue" and self._broken != ""
            await self._engine.llm.resume_generation()
        return None

    async def _take(self, spec: TransferSpec, version: int) -> None:
        if spec.adapter is None:
            await self._take_all(spec)
        else:
            await self._take_adapter(spec, spec.adapter)
        await self._engine.llm.update_weight_version(str(version))
        found = await self._engine.llm.get_weight_version()
        if found != str(version):
            raise WeightSyncError(
                f"weight sync {spec.session}: vLLM says that it has version {found}, wanted {version}"
            )
        self._broken = ""

    async def _take_adapter(self, spec: TransferSpec, info: AdapterInfo) -> None:
        from vllm.lora.request import LoRARequest

        received = await asyncio.to_thread(lambda: {n: t.clone() for n, t in receive(spec, self._rank.rank)})
        model = self._engine.model
        with adapter.folder(received, info, model, adapter.check(received, info, stored_shapes(model))) as folder:
            self._broken = "it ended half way"
            request = LoRARequest(adapter.NAME, adapter.NUMBER, folder, load_inplace=True)
            if not await self._engine.llm.add_lora(request):
                raise WeightSyncError(f"weight sync {spec.session}: vLLM did not load the adapter")
        # Without `load_inplace`, because each request with it would load the adapter again.
        self._adapter = LoRARequest(adapter.NAME, adapter.NUMBER, folder)

    async def _take_all(self, spec: TransferSpec) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._engine.llm
        update = {"spec": asdict(spec), "receiver": self._rank.rank * self._engine.processes}
        broken, self._broken = self._broken, "it ended half way"
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=update))
        await llm.finish_weight_update()
        reports = await llm.collective_rpc("whet_report")
        failure, spoilt = failure_among(reports)
        if failure:
            self._broken = failure if spoilt else broken
            raise WeightSyncError(failure)
        if {report["session"] for report in reports} != {spec.session}:
            raise WeightSyncError(f"weight sync {spec.session}: vLLM's workers took {reports}")


class _Mailbox:
    """Carries outcomes from the engine's loop to the caller's loop, as many at a time as have arrived."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._event = loop, asyncio.Event()
        self._outcomes: deque[Outcome | Exception] = deque()
        self.tasks: list[asyncio.Task[None]] = []
        """Tasks of the requests whose outcomes it carries."""

    def put(self, outcome: Outcome | Exception) -> None:
        """Deliver an outcome or a report of tokens. Called on the engine's loop."""
        self._outcomes.append(outcome)
        if len(self._outcomes) == 1:
            with suppress(RuntimeError):  # its loop was closed, and nobody waits any more
                self._loop.call_soon_threadsafe(self._event.set)

    async def take(self) -> list[Outcome]:
        """Wait for outcomes and return them. Raises an error that was delivered."""
        while not self._outcomes:
            self._event.clear()
            if not self._outcomes:
                await self._event.wait()
        found: list[Outcome] = []
        while self._outcomes:
            outcome = self._outcomes.popleft()
            if isinstance(outcome, Exception):
                raise outcome
            found.append(outcome)
        return found
