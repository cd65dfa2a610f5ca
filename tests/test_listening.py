"""What a run opens to the network: on one machine nothing that another machine could reach."""

import os
import time
from pathlib import Path

import pytest

LISTENING = "0A"
"""State of a TCP socket in `/proc/net/tcp`."""

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are listed by Linux alone")


def family(pid: int) -> set[int]:
    """Return a process and all that descend from it."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: set[int]) -> set[tuple[str, str]]:
    """Return the addresses at which some processes listen, as the kernel writes them, and whose they are."""
    owners = {}
    for pid in pids:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
            owners |= {os.readlink(link): command for link in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and (command := owners.get(f"socket:[{rest[5]}]")):
                found.add((local.partition(":")[0], command))
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.mark.parametrize("launcher", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_ranks_of_one_machine_listen_on_the_loopback_alone(tmp_path, small_run, start_whet, launcher):
    if launcher == "ray":
        pytest.importorskip("ray")
    cluster = {"launcher": launcher, "ranks": {"backend": 2}, "threads": {"backend": 1, "generator": 1}}
    config = small_run(tmp_path, run={"folder": str(tmp_path / "run"), "steps": 200}, cluster=cluster)
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    seen, deadline = set[tuple[str, str]](), time.monotonic() + 240
    run = start_whet("run", config, variables=environment)
    try:
        steps = tmp_path / "run/metrics.jsonl"
        while not (steps.exists() and steps.read_text().count("\n") > 2):
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline
            seen |= listening(family(run.pid))
            time.sleep(0.02)
        seen |= listening(family(run.pid))
    finally:
        run.kill()
        run.communicate()
    assert seen, "gloo listens"
    assert [f"{address} {command}" for address, command in sorted(seen) if address not in LOOPBACK] == []
