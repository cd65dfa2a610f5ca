"""Run the real Megatron Core on CPUs over gloo. Where there is a GPU, nothing here does anything.

Megatron names CUDA directly. While `on_cpu` is entered, the names that it uses answer for the CPU:

    torch.cuda.current_device, streams, events, synchronize     the CPU, and nothing to wait for
    torch.cuda random state                                     the CPU's generator
    device="cuda" in factories, .cuda(), .pin_memory()          the CPU, the tensor itself

Outside of it they are torch's own, so other code in the process sees no difference.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import torch
from attrs import define, field
from torch.overrides import TorchFunctionMode

from whet_megatron.layers import refuse_broken

P = ParamSpec("P")
T = TypeVar("T")
_CPU = torch.device("cpu")


class _CudaToCpu(TorchFunctionMode):
    """Place on the CPU what is to be placed on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _place(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], *map(_place, args[1:]))
        return func(*args, **kwargs)


def _place(wanted: Any) -> Any:
    """Return the CPU for a GPU, and everything else as it is."""
    named = isinstance(wanted, str) and wanted.startswith("cuda")
    return _CPU if named or (isinstance(wanted, torch.device) and wanted.type == "cuda") else wanted


class _Stream:
    """A stream on which everything is done as soon as it is asked for; and an event that has happened."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        """Do nothing."""

    wait_event = wait = synchronize = record = wait_stream

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has happened."""
        return event or _Stream()

    def query(self) -> bool:
        """Return whether all is done."""
        return True


def _random_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.random.get_rng_state()


def _set_random_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.random.set_rng_state(state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


_CUDA: dict[str, Any] = {
    "current_device": lambda: _CPU,
    # torch's compiler lists its functions, each of which must be another object
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "Stream": type("Stream", (_Stream,), {}),
    "Event": type("Event", (_Stream,), {}),
    "current_stream": lambda device=None: _Stream(),
    "default_stream": lambda device=None: _Stream(),
    "stream": lambda stream: nullcontext(),
    "get_rng_state": _random_state,
    "set_rng_state": _set_random_state,
    "manual_seed": _seed,
}


@define(eq=False)
class _Patched:
    """The names that are replaced, which all threads see, and how many threads need them."""

    names: ExitStack = field(factory=ExitStack)
    threads: int = 0
    lock: threading.Lock = field(factory=threading.Lock)


_patched = _Patched()
_here = threading.local()
"""`entered`: whether this thread has entered `on_cpu`."""


@contextmanager
def on_cpu() -> Iterator[None]:
    """Answer for the CPU wherever Megatron names CUDA. May be entered again while it is entered, and in many threads:
    with inline workers, a backend and a generator compute in different threads.
    """
    if torch.cuda.is_available() or getattr(_here, "entered", False):
        yield
        return
    refuse_broken()
    # Some modules of it compile functions when they are imported, which lists torch's functions by name.
    import_module("whet_megatron.ahead")
    with _names(), _CudaToCpu():
        _here.entered = True
        try:
            yield
        finally:
            _here.entered = False


@contextmanager
def _names() -> Iterator[None]:
    """Replace names of modules as long as any thread needs it."""
    with _patched.lock:
        if not _patched.threads:
            _patch(_patched.names)
        _patched.threads += 1
    try:
        yield
    finally:
        with _patched.lock:
            _patched.threads -= 1
            if not _patched.threads:
                _patched.names.close()


def _patch(stack: ExitStack) -> None:
    import megatron.core.tensor_parallel.random as randomness

    for name, value in _CUDA.items():
        stack.enter_context(patch.object(torch.cuda, name, value))
    stack.enter_context(patch.object(torch.nn.Module, "cuda", lambda self, *args, **kwargs: self))
    stack.enter_context(patch.object(randomness, "_get_cuda_rng_state", _random_state))
    stack.enter_context(patch.object(randomness, "_set_cuda_rng_state", _set_random_state))
    _patch_experts(stack)


def as_on_gpu(method: Callable[P, T]) -> Callable[P, T]:
    """Wrap a method that calls Megatron."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with on_cpu():
            return method(*args, **kwargs)

    return call


def _patch_experts(stack: ExitStack) -> None:
    """Replace what mixtures of experts need of CUDA and of Transformer Engine."""
    import megatron.core.transformer.moe.moe_utils as utils
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    if not hasattr(utils, "te_general_gemm"):  # Megatron looks it up, and does not define it without the engine
        stack.enter_context(patch.object(utils, "te_general_gemm", None, create=True))

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Return splits of an all-to-all as numbers, also of a tensor that is on the CPU already."""
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    for module in (utils, dispatcher):
        stack.enter_context(patch.object(module, "maybe_move_tensor_to_cpu", moved))


@contextmanager
def optimizer_types() -> Iterator[None]:
    """Answer `Tensor.type()` with the names of CUDA's types, with which Megatron's optimizers compare."""
    if torch.cuda.is_available():
        yield
        return
    plain = torch.Tensor.type

    def named(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is not None:
            return plain(self, dtype, non_blocking, **kwargs)
        name = str(plain(self))
        return name if "cuda" in name else name.replace("torch.", "torch.cuda.", 1)

    with patch.object(torch.Tensor, "type", named):
        yield
