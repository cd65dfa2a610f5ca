"""The resources of this machine, found without torch: the cores and memory that a container may use, and the GPUs."""

import ctypes
import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def usable_cores(root: Path = ROOT) -> int:
    """Return the number of cores that this process may use: its CPU affinity, or its container's quota if less."""
    bound, quota = len(os.sched_getaffinity(0)), cpu_quota(root)
    return bound if quota is None else max(1, min(bound, math.floor(quota)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the container's CPU quota, in cores; None: no limit."""
    shares = []
    for folder in _groups(root, "cpu"):
        limits = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")
        ]  # fmt: skip
        if len(limits) == 2 and all(word.isdecimal() for word in limits) and int(limits[1]):
            shares.append(int(limits[0]) / int(limits[1]))
    return min(shares, default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the bytes of memory that the container may use; None: no limit."""
    return min((limit for _, limit in _memory_limits(root)), default=None)


def _memory_limits(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of the control groups that limit memory, and their limits in bytes."""
    for folder in _groups(root, "memory"):
        for word in _words(folder / "memory.max") + _words(folder / "memory.limit_in_bytes"):
            if word.isdecimal() and int(word) < 1 << 60:  # version 1 writes a huge number for no limit
                yield folder, int(word)


def available_memory(root: Path = ROOT) -> int:
    """Return the bytes of memory that programs can still take: what is free, or is left of a container's limit."""
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    free = next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")
    return min((free, *(max(0, limit - _taken(folder)) for folder, limit in _memory_limits(root))))


def _taken(folder: Path) -> int:
    """Return the bytes that a control group uses, without pages of files that it has not read for a while."""
    used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes") or ["0"]
    parts = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat"))
    return int(used[0]) - int(parts.get("total_inactive_file") or parts.get("inactive_file") or 0)


def total_memory(root: Path = ROOT) -> int | None:
    """Return the bytes of memory of this machine, or the container's limit if less; None: unknown."""
    found = [int(words[1]) << 10 for line in _lines(root / "proc/meminfo") if (words := line.split())[0] == "MemTotal:"]
    return min((*found, *filter(None, [memory_limit(root)])), default=None)


def gpu_memory(count: int) -> tuple[int | None, ...]:
    """Return the bytes of memory of each GPU that this process may use, as NVML reports them; empty: unknown.

    If `CUDA_VISIBLE_DEVICES` names GPUs by anything but their numbers, each counts as the smallest GPU.
    """
    sizes = _nvml_sizes() if count else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not sizes:
        return tuple(sizes)
    names = _visible(visible)
    if all(name.isdecimal() and int(name) < len(sizes) for name in names):
        return tuple(sizes[int(name)] for name in names)
    return (min(sizes),) * len(names)


def _nvml_sizes() -> list[int]:
    class Memory(ctypes.Structure):
        _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return []
        count, found = ctypes.c_uint(), list[int]()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device, memory = ctypes.c_void_p(), Memory()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                return []
            if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
                return []
            found.append(int(memory.total))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):  # the library is not installed, or lacks these functions
        return []
    return found


def gpu_count(root: Path = ROOT) -> int:
    """Return the number of GPUs that the GPU driver shows and `CUDA_VISIBLE_DEVICES` allows."""
    driver = root / "proc/driver/nvidia/gpus"
    gpus = len(list(driver.iterdir())) if driver.is_dir() else len(list((root / "dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else min(gpus, len(_visible(visible)))


def _visible(names: str) -> list[str]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` names. CUDA ends at the first number below 0: -1 hides all."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    return found[: next((i for i, name in enumerate(found) if name.startswith("-")), None)]


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of its parents, each of which may set a limit.

    Both versions of control groups are included.
    """
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0":
            mount = root / "sys/fs/cgroup"
        elif controller in names.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        parts = Path(path).parts[1:]
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth])


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):  # the file does not exist, or may not be read
        return []
