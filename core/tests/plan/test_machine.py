"""A container's limits count, whichever version of control groups sets them."""

import os
from pathlib import Path

import pytest

from whet.plan.machine import available_memory, cpu_quota, gpu_count, memory_limit, total_memory, usable_cores
from whet.plan.prepare import machine


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/\n"}, None),  # the root of a machine has no such file
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/docker/x\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, None),
    ],
)
def test_the_quota_is_the_smallest_of_the_group_and_those_around_it(tmp_path, files, quota) -> None:
    assert cpu_quota(lay(tmp_path, files)) == quota


@pytest.mark.parametrize(("quota", "expected"), [("100000", 1), ("50000", 1), ("199999", 1), ("90000000", 900)])
def test_cores_beyond_the_quota_are_not_used(tmp_path: Path, quota: str, expected: int) -> None:
    root = lay(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"})
    assert usable_cores(root) == min(expected, len(os.sched_getaffinity(0)))


def test_memory_is_what_is_left_within_the_containers_limit(tmp_path: Path) -> None:
    root = lay(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   2048 kB\n", "proc/self/cgroup": "0::/\n"})
    assert (memory_limit(root), available_memory(root)) == (None, 2048 << 10)
    assert total_memory(root) == 9 << 10
    lay(root, {"sys/fs/cgroup/memory.max": "1048576\n"})
    assert (memory_limit(root), available_memory(root)) == (1 << 20, 1 << 20)
    assert total_memory(root) == 9 << 10, "the limit is more than there is"
    lay(root, {"sys/fs/cgroup/memory.max": "4096\n"})
    assert total_memory(root) == 4096
    lay(root, {"proc/self/cgroup": "5:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"})
    assert memory_limit(root) is None


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/a\n",
            "sys/fs/cgroup/a/memory.max": "1000\n",
            "sys/fs/cgroup/a/memory.current": "900\n",
            "sys/fs/cgroup/a/memory.stat": "anon 700\nfile 200\ninactive_file 50\n",
        },
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": "1000\n",
            "sys/fs/cgroup/a/memory.current": "850\n",
            "sys/fs/cgroup/a/b/memory.max": "900\n",
            "sys/fs/cgroup/a/b/memory.current": "100\n",
        },
        {
            "proc/self/cgroup": "5:memory:/a\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1000\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "900\n",
            "sys/fs/cgroup/memory/a/memory.stat": "inactive_file 5\ntotal_inactive_file 50\n",
        },
    ],
    ids=["version 2", "the group around it", "version 1"],
)
def test_what_the_container_uses_is_no_longer_available(tmp_path: Path, files: dict[str, str]) -> None:
    root = lay(tmp_path, {"proc/meminfo": "MemAvailable: 2048 kB\n", **files})
    assert available_memory(root) == 150


def test_a_container_over_its_limit_has_no_memory_left(tmp_path: Path) -> None:
    group = {"sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "1100\n"}
    root = lay(tmp_path, {"proc/meminfo": "MemAvailable: 2048 kB\n", "proc/self/cgroup": "0::/\n", **group})
    assert available_memory(root) == 0


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 2), ("", 0), ("1", 1), ("0,1,2", 2), ("-1", 0), ("0,-1,1", 1)]
)
def test_hidden_gpus_are_not_counted(tmp_path: Path, monkeypatch, visible: str | None, expected: int) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        lay(tmp_path, {f"dev/{name}": ""})
    assert gpu_count(tmp_path) == expected


def test_a_plan_is_made_for_the_cores_that_may_be_used() -> None:
    assert machine().cores == usable_cores()
