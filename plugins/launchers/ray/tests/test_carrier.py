"""Weights in shared memory reach another node, once for all receivers there. Two Ray nodes on this machine."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from whet.errors import WorkerError
from whet.interfaces.weights import TransferSpec
from whet_ray.carrier import PIECE_BYTES, Carriers, MemoryCarrier
from whet_ray.cluster import RayCluster
from whet_weights.carry import carry

pytestmark = pytest.mark.usefixtures("forks_under_ray")
APART = {"backend": {"train": 1}, "generator": {"gen": 1}}
HOLDER = f"file:{Path(__file__).with_name('carried.py')}:Holder"
MEGABYTES = 20


@pytest.fixture
def ends(two_nodes: Any, tmp_path: Path) -> Iterator[tuple[RayCluster, Any, Any]]:
    """A sender on one node and two receivers on the other."""
    with RayCluster(tmp_path, address=two_nodes.address, resources=APART) as cluster:
        groups = cluster.worker_group("backend", threads=1), cluster.worker_group("generator", 2, threads=1)
        backend, generator = (part.spawn(HOLDER, {}) for part in groups)
        yield cluster, backend, generator


def make_spec(folder: Path, version: int, seconds: float = 60.0) -> TransferSpec:
    return TransferSpec("shared-memory", str(folder / "weights"), f"s{version}", version, timeout_seconds=seconds)


def test_weights_reach_every_receiver_of_another_node_bit_for_bit(ends: Any, tmp_path: Path) -> None:
    cluster, backend, generator = ends
    for version in (1, 2):
        spec = make_spec(tmp_path, version)
        waiting = generator.start("receive_weights", spec)
        backend.call("send_weights", spec, MEGABYTES)
        carry(spec, cluster.copy_memory)
        (one, other), local = waiting.result(), backend.call("receive_weights", spec)[0]
        assert one == other == local
        assert len(local) == MEGABYTES


def test_a_node_that_has_a_copy_gets_no_second_one(ends: Any, tmp_path: Path) -> None:
    cluster, backend, generator = ends
    spec, calls = make_spec(tmp_path, 1), []
    backend.call("send_weights", spec, 1)

    def counted(*order: Any) -> Any:
        found = cluster.copy_memory(*order)
        calls.append(len(found))
        return found

    carry(spec, counted)
    carry(spec, counted)
    assert calls == [1, 0]
    assert generator.call("receive_weights", spec)[0] == backend.call("receive_weights", spec)[0]


def test_a_sender_that_is_gone_ends_the_wait_of_receivers_on_other_nodes(ends: Any, tmp_path: Path) -> None:
    cluster, backend, generator = ends
    spec = make_spec(tmp_path, 1)
    backend.call("send_weights", spec, 2)
    os.kill(next(c for n, c in cluster._connections.items() if n == "backend-0").pid, signal.SIGKILL)
    with pytest.raises(WorkerError):
        backend.call("receive_weights", spec)
    waiting = generator.start("receive_weights", spec)
    carry(spec, cluster.copy_memory)
    with pytest.raises(WorkerError, match=r"its weights could not be carried to node .*No such file"):
        waiting.result()


def test_a_killed_receiver_leaves_the_copy_to_the_others_and_no_file(ends: Any, tmp_path: Path) -> None:
    cluster, backend, generator = ends
    before = set(os.listdir("/dev/shm"))
    spec = make_spec(tmp_path, 1)
    backend.call("send_weights", spec, MEGABYTES)
    carry(spec, cluster.copy_memory)
    victim = generator.start_on(0, "begin", spec).result()[0]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerError):
        generator.start_on(0, "receive_weights", spec).result()
    assert len(generator.start_on(1, "receive_weights", spec).result()[0]) == MEGABYTES
    assert {name for name in os.listdir("/dev/shm") if "whet" in name} <= before


def test_a_carrier_that_dies_in_the_middle_is_an_error_and_the_next_transfer_succeeds(
    ends: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, backend, generator = ends

    class Fragile(MemoryCarrier):
        def write(self, key: str, offset: int, piece: Any) -> None:
            if offset >= PIECE_BYTES:
                os._exit(1)
            super().write(key, offset, piece)

    monkeypatch.setattr("whet_ray.carrier.MemoryCarrier", Fragile)
    spec = make_spec(tmp_path, 1)
    backend.call("send_weights", spec, MEGABYTES)
    waiting = generator.start("receive_weights", spec)
    carry(spec, cluster.copy_memory)
    with pytest.raises(WorkerError, match="its weights could not be carried to node"):
        waiting.result()
    monkeypatch.undo()
    again = make_spec(tmp_path, 2)
    backend.call("send_weights", again, MEGABYTES)
    carry(again, cluster.copy_memory)
    assert generator.call("receive_weights", again)[1] == backend.call("receive_weights", again)[0]


def test_carriers_that_were_never_started_are_closed() -> None:
    Carriers().close()
