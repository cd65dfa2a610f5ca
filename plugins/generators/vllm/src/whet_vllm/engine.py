"""Start vLLM's engine, and report with the engine's own log lines why it did not start or has died."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from whet.errors import WhetError
from whet.interfaces.workers import WorkerRank
from whet.runtime.watchdog import FAMILY, watchdog
from whet_generation.engine_log import causes, points_elsewhere
from whet_generation.external_engine import visible_gpus
from whet_vllm.arguments import BACKEND
from whet_vllm.leftovers import note, sweep
from whet_vllm.log_capture import captured_stderr, end_capture, logging_config

QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "SPT_NOENV": "1",  # else a process that renames itself loses the mark that the watchdog looks for
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines on one machine would all choose the same cores
}
"""Environment variables of the engine, unless they are set already."""

_NO_EXPERTS = (
    "vLLM records the experts of tokens on GPUs only; leave out backend.experts.record and replay, or sample with the "
    "generator hf"
)
CLOSE_SECONDS = 5.0
"""Time for running requests when the engine is closed."""


class Engine:
    """An engine and its log files. `llm` is vLLM's `AsyncLLM`. Must be made and used on one event loop."""

    def __init__(self, rank: WorkerRank, arguments: Mapping[str, Any], scratch: Path) -> None:
        self._log = scratch / f"vllm-{rank.role}-{rank.rank}.log"
        self._shared, self._stderr = self._log.with_suffix(".shared"), self._log.with_suffix(".stderr")
        self._log.unlink(missing_ok=True)  # the log of an earlier engine, which this one replaces
        sweep(self._shared)
        self._guards = ExitStack()
        logging = logging_config(self._log.with_suffix(".json"), self._log)
        with self._guards:
            self._guards.enter_context(_guarded(self._log.with_suffix(".alive")))
            # Even with enforce_eager vLLM compiles a function that counts ranks, which takes many seconds.
            plain = {"TORCH_COMPILE_DISABLE": "1"} if rank.device == "cpu" and arguments["enforce_eager"] else {}
            if arguments.get("enable_return_routed_experts"):
                if rank.device == "cpu":
                    raise WhetError(_NO_EXPERTS)
                plain["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that records experts
            chosen = {**visible_gpus(rank.device), "VLLM_LOGGING_CONFIG_PATH": str(logging)}
            with environment({**QUIET, **plain, **os.environ, **chosen}):
                self.llm = self._start(dict(arguments))
            self._guards = self._guards.pop_all()
        note(self._shared)
        self.has_tokenizer = not arguments["skip_tokenizer_init"]
        self.processes, self.model = int(arguments["tensor_parallel_size"]), str(arguments["model"])
        config = self.llm.model_config
        self.max_length, self.vocab_size = int(config.max_model_len), int(config.get_vocab_size())

    def dead(self) -> str:
        """Return an error message with the last log lines of the engine that has died."""
        return f"vLLM's engine has died; its last words:\n{self.last_words()}"

    def last_words(self) -> str:
        """Return the causes of failure that the engine's processes have logged."""
        return causes(self._log, self._stderr) or "none"

    def close(self) -> None:
        """Stop the engine's processes."""
        with self._guards:
            self.llm.shutdown(timeout=CLOSE_SECONDS)
            self.llm = None  # else it would shut down again while the interpreter exits
        sweep(self._shared)

    def _start(self, arguments: dict[str, Any]) -> Any:
        try:
            from vllm import __version__
            from vllm.config.weight_transfer import WeightTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise WhetError(f"vLLM cannot be imported: {error}") from error
        try:
            chosen = AsyncEngineArgs(**arguments, weight_transfer_config=WeightTransferConfig(backend=BACKEND))
            with captured_stderr(self._stderr) as tee:
                self._guards.callback(end_capture, tee)
                return AsyncLLM.from_engine_args(chosen)
        except (Exception, SystemExit) as error:  # e.g. a refused config, or an engine process that died
            said = causes(self._log, self._stderr) if points_elsewhere(str(error)) else ""
            raise WhetError(f"vLLM {__version__} did not start. It said:\n{said or _in_one(error)}") from error


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of the context."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _guarded(name: Path) -> Iterator[None]:
    """Make sure that the engine's processes end when this process ends, in whatever way it ends.

    In a worker process nothing has to be done: the processes that it starts are in its process group and have its mark.
    In the driver, with inline workers, the engine's processes get the driver's mark, so the driver's watchdog ends
    them.
    """
    if FAMILY in os.environ:
        yield
        return
    name.mkdir(exist_ok=True)
    watchdog().guard("folder", str(name))
    try:
        with environment({FAMILY: f"{watchdog().family}.engine"}):
            yield
    finally:
        watchdog().release("folder", str(name))


def _in_one(error: BaseException) -> str:
    """Return an error's message. For pydantic errors: without the dump of the input and the address of the manual."""
    lines = [line for line in str(error).splitlines() if "For further information visit" not in line]
    return "\n".join(line.partition(" [type=")[0] for line in lines) or type(error).__name__
