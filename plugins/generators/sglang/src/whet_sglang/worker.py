"""The worker: starts a process that holds SGLang's engine, passes calls on to it, and reports why it died.

worker      the process of the generator's rank, which other roles may share
process     `whet_sglang.process`: holds SGLang's engine. The engine kills its process and all children when one of
            its parts fails, and when it is closed
scheduler, detokenizer      SGLang's own processes
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from whet.config.sections import DeadlinesSection
from whet.data.records import Completion, Request
from whet.errors import WeightSyncError, WhetError, WorkerError, WorkerLost
from whet.interfaces.generator import OnWeightUpdate
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import WorkerRank
from whet.runtime.local import LocalCluster
from whet.runtime.watchdog import watchdog
from whet.runtime.worker_process import give_up
from whet_generation.engine_log import causes, errors, points_elsewhere
from whet_generation.external_engine import visible_gpus
from whet_sglang.arguments import ENGINE, SWITCH

Outcome = Completion | tuple[str, str]
"""A completion, or (id, why the request cannot be served)."""

LONG = 1e6
DEADLINES = DeadlinesSection(start=LONG, generate=LONG, weight_sync=LONG)
"""Practically none: the caller of this worker sets the deadlines."""
_NO_EXPERTS = (
    "SGLang records the experts of tokens on GPUs only; leave out backend.experts.record and replay, or sample with "
    "the generator hf"
)
ENVIRONMENT = {
    SWITCH: "1",
    "HF_HUB_OFFLINE": "1",
    "SPT_NOENV": "1",  # else a process that renames itself loses the mark by which it is found
}


class Worker:
    """One engine in a process of its own."""

    def __init__(
        self,
        rank: WorkerRank,
        *,
        arguments: Mapping[str, Mapping[str, Any]],
        engine: Mapping[str, Any],
        scratch: str,
    ) -> None:
        ENGINE.refuse(engine)
        self._on_gpu = rank.device != "cpu"
        name = f"sglang-{rank.role}-{rank.rank}"
        self._log = Path(scratch) / f"{name}-0.log"
        self._log.unlink(missing_ok=True)
        self._leavings: list[str] = []
        self._temporary = tempfile.mkdtemp(prefix="whet-")  # short, as names of sockets must be
        watchdog().guard("folder", self._temporary)
        environment = {**_environment(self._on_gpu), **visible_gpus(rank.device), "TMPDIR": self._temporary}
        self._cluster = LocalCluster(Path(scratch), DEADLINES, environment=environment)
        try:
            chosen = dict(arguments["cuda" if self._on_gpu else "cpu"])
            if chosen.get("enable_return_routed_experts") and not self._on_gpu:
                raise WhetError(_NO_EXPERTS)
            place = self._cluster.worker_group(name, threads=rank.threads)
            self._engine = place.spawn(
                "whet_sglang.process:Process",
                {"arguments": chosen, "receiver": rank.rank, "reports": str(self._log.with_suffix(".reports"))},
            )
            (self._leavings,) = self._engine.call("leavings")
        except BaseException as error:
            self._end()
            if isinstance(error, WorkerError):
                raise WhetError(f"SGLang did not start with generator's settings. {self._said(error)}") from error
            raise

    async def generate(self, requests: list[Request]) -> AsyncIterator[list[Outcome]]:
        """Serve requests. Yields outcomes as they arrive; outcomes that arrive together are one list."""
        try:
            async for outcomes in self._engine.stream(0, "generate", requests, phase="generate"):
                yield outcomes
        except WorkerError as error:
            raise self._failure(error) from error

    async def abort(self, ids: list[str]) -> AsyncIterator[None]:
        """End requests early with `stop="abort"`: waiting requests at once, running requests at their next token."""
        await self._ask("abort", ids)
        yield None

    async def receive_weights(self, spec: TransferSpec, version: int, on_weight_update: OnWeightUpdate) -> None:
        """Take the weights of a weight sync.

        If it is refused before the first tensor is loaded, the old weights stay in use. If it fails half way, as one by
        `broadcast` and `cuda-ipc` may, nothing is generated until a sync is complete.
        """
        try:
            await self._ask("receive_weights", spec, version, on_weight_update)
        except WhetError as error:
            raise WeightSyncError(str(error)) from error

    async def sleep(self) -> None:
        """Free GPU memory and move weights to the host. SGLang does not report the size. On a CPU it cannot sleep."""
        if self._on_gpu:
            await self._ask("sleep")

    async def wake(self) -> None:
        """Bring weights and cache back."""
        if self._on_gpu:
            await self._ask("wake")

    def close(self) -> None:
        """Stop the engine's processes and remove the files that they leave behind."""
        self._engine.close()
        self._end()

    def _end(self) -> None:
        self._cluster.close()
        for file in self._leavings:
            Path(file).unlink(missing_ok=True)
        shutil.rmtree(self._temporary, ignore_errors=True)  # which SGLang leaves behind
        watchdog().release("folder", self._temporary)

    async def _ask(self, method: str, *args: Any) -> None:
        try:
            await asyncio.to_thread(self._engine.call, method, *args)
        except WorkerError as error:
            raise self._failure(error) from error

    def _failure(self, error: WorkerError) -> WhetError:
        """Return the engine's error. If the engine is lost, end this worker, too."""
        if not isinstance(error, WorkerLost):
            return WhetError(error.cause)
        words = f"SGLang's engine has died. {self._said(error)}"
        self._end()
        give_up(words)
        return WhetError(words)

    def _said(self, error: WorkerError) -> str:
        if isinstance(error, WorkerLost) and (found := causes(self._log)):
            return f"Its last words:\n{found}"
        said = errors(self._log) if points_elsewhere(error.cause) else ""
        return f"It said:\n{said or error.cause}"


def _environment(on_gpu: bool) -> dict[str, str]:
    """Return the engine's environment variables. Variables that are set already keep their values."""
    found = {**ENVIRONMENT, **({} if on_gpu else {"SGLANG_USE_CPU_ENGINE": "1"})}
    kept = {name: os.environ[name] for name in found if name in os.environ}
    return {**found, **kept}
