"""Count the bytes of live tensors while code runs on tensors without memory.

    mesh, sharded model on the meta device        before: a DeviceMesh reads values, which fake tensors do not have
    with fake_tensors() as live:
        model.to_empty(device="cpu")              every storage is counted until Python frees it
        with live.phase("train"): ...             -> live.timelines["train"], bytes after each operation

A GPU is computed as `cpu`, too: PyTorch without CUDA cannot differentiate on fake CUDA tensors. The operations are the
same where the traced code chooses them by the device that is meant.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

_VALUE = torch.ops.aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in PyTorch
    """Counts live storages. A value that code reads from a fake tensor is 1; see `reading`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in PyTorch
        self.now = 0
        """Bytes of the storages that live now."""
        self.timelines: dict[str, list[tuple[str, int]]] = {}
        """A `whet_memory.timelines.Timeline` for each phase, since the last `forget`."""
        self._sizes: dict[int, int] = {}
        self._line: list[tuple[str, int]] = []
        self._most = 0
        self._resize = torch.UntypedStorage.resize_
        self._values: Iterator[int] = iter(())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record operations under a name."""
        before, self._line, self._most = self._line, self.timelines.setdefault(name, []), self.now
        try:
            yield
        finally:
            self._line.append(("end", self.now))
            self._line = before

    @contextmanager
    def reading(self, values: Iterable[int]) -> Iterator[None]:
        """Return these in turn for the integers that code reads from fake tensors in this context."""
        before, self._values = self._values, iter(values)
        try:
            yield
        finally:
            self._values = before

    def forget(self) -> None:
        """Drop what was recorded so far: a first step has no moments of the optimizer yet."""
        self.timelines.clear()

    def __enter__(self) -> "LiveBytes":
        """Begin to count. FSDP2 frees gathered weights by `UntypedStorage.resize_`, which is no operation."""

        def resize_(storage: Any, size: int) -> None:
            self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, storage.nbytes())

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]  # restored below
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in PyTorch
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]  # as it was
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in PyTorch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it returns."""
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # more than half of all calls
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # else only the wrapper would be seen, and not the shard within
        if func is _VALUE:
            kind = args[0].dtype
            return True if kind == torch.bool else 1.0 if kind.is_floating_point else next(self._values, 1)
        for value in args:  # index tensors that NumPy made are results of no operation
            if isinstance(value, Tensor):
                self._add(value)
        found = func(*args, **(kwargs or {}))
        for value in tree_iter(found):
            if isinstance(value, Tensor):
                self._add(value)
        self._line.append((func.name(), self._most))
        self._most = self.now
        return found

    def _add(self, tensor: Any) -> None:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            for inner in (getattr(tensor, name) for name in names):
                if isinstance(inner, Tensor):  # DTensor lists its mesh, too
                    self._add(inner)
            return
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._drop, key)
        self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.now += size - self._sizes[key]
        self._sizes[key] = size
        self._most = max(self._most, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


@contextmanager
def fake_tensors() -> Iterator[LiveBytes]:
    """Make all tensors in this context fake, and count them."""
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        yield live


@contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """Be rank 0 of a group of `size` ranks in this context. Its collectives return at once: no other rank exists.

    The group ends with the context. Else code that runs later, and processes that are forked, would use it.
    """
    import torch.distributed as dist
    import torch.distributed._tools.fake_collectives  # noqa: F401  # collectives on fake tensors
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
