"""Measure the most memory that a worker holds in each phase of its work.

On a GPU: `torch.cuda.max_memory_allocated`, the bytes of tensors. On a CPU: the peak of resident memory that is neither
a mapped file nor shared, beyond what the process had before it loaded a model. Linux counts it without sampling: a
write to `/proc/self/clear_refs` begins anew (proc_pid_clear_refs(5)), and `VmHWM` is the peak since. Weights that lie
in a mapped file are added (`PeakMeter.count_mapped`): the computation needs them, as it needs all others.
"""

from bisect import bisect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from whet.data import metrics
from whet.data.metrics import Metric

if TYPE_CHECKING:
    import torch

STATUS, CLEAR, MAPS = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/self/maps")
_MAPPED: Final[WeakKeyDictionary["PeakMeter", int]] = WeakKeyDictionary()
"""Bytes of weights in mapped files, of all roles in this process: each of them measures the process."""
GIB = 2**30


class PeakMeter:
    """Measures the phases of one role in this process. Roles that share the process are part of what it sees."""

    def __init__(self, device: "torch.device", role: str) -> None:
        """Make a meter before the model is loaded. `role` is part of the metric names."""
        self._device, self._role = device, role
        self._peaks: dict[str, int] = {}
        self._before = 0 if device.type == "cuda" else _status().get("RssAnon", 0)
        self._able = device.type == "cuda" or _begin()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase. Phases do not overlap: an inner one would begin the measurement of the outer one anew."""
        if not self._able:
            yield
            return
        self._begin()
        try:
            yield
        finally:
            self._peaks[name] = max(self._peaks.get(name, 0), self._peak())

    def count_mapped(self, tensors: "Iterable[torch.Tensor]") -> None:
        """Count the tensors among these that lie in mapped files as memory from now on, and no others of this role."""
        if self._device.type == "cpu":
            files = _mapped_files()
            held = {one.data_ptr(): one.nbytes for one in tensors}
            _MAPPED[self] = sum(size for place, size in held.items() if _lies_in(files, place))

    def metrics(self) -> dict[str, Metric]:
        """Return the peaks since the last call, in GiB, e.g. `memory/backend.train`."""
        found = {f"memory/{self._role}.{name}": metrics.largest(peak / GIB) for name, peak in self._peaks.items()}
        self._peaks = {}
        return found

    def _begin(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.init()  # type: ignore[no-untyped-call]  # PyTorch's statistics begin with its first use of a GPU
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _begin()

    def _peak(self) -> int:
        if self._device.type == "cuda":
            import torch

            return int(torch.cuda.max_memory_allocated(self._device))
        now = _status()
        return max(0, now["VmHWM"] - now["RssFile"] - now["RssShmem"] - self._before) + sum(_MAPPED.values())


def _begin() -> bool:
    """Begin the kernel's count of the peak anew. Return whether the kernel allows it."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return {"VmHWM", "RssAnon", "RssFile", "RssShmem"} <= set(_status())


def _status() -> dict[str, int]:
    """Return the bytes of resident memory by the names of `/proc/self/status`."""
    try:
        lines = (line.split() for line in STATUS.read_text().splitlines())
        return {words[0][:-1]: int(words[1]) << 10 for words in lines if len(words) == 3 and words[2] == "kB"}
    except OSError:
        return {}


def _mapped_files() -> list[tuple[int, int]]:
    """Return the first and last address of each mapped file, ascending."""
    try:
        rows = [line.split(maxsplit=5) for line in MAPS.read_text().splitlines()]
    except OSError:
        return []
    return [(int(begin, 16), int(end, 16)) for begin, end in (row[0].split("-") for row in rows if row[4] != "0")]


def _lies_in(files: list[tuple[int, int]], place: int) -> bool:
    """Return whether an address lies in one of the ranges."""
    at = bisect(files, (place, 1 << 64)) - 1
    return at >= 0 and files[at][0] <= place < files[at][1]
