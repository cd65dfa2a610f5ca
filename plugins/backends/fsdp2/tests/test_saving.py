"""A checkpoint is written by a thread from a copy, while the worker trains."""

import asyncio
import threading
import weakref
from pathlib import Path

import pytest
import torch

from whet.component import Spec
from whet.errors import WhetError
from whet.interfaces.workers import WorkerRank
from whet_fsdp2 import checkpoint
from whet_fsdp2.ranks import Ranks
from whet_testing.held import held_processes
from whet_training import saving

LIKELIHOOD = Spec("whet_testing.losses:Likelihood")


@pytest.fixture
def gate(monkeypatch):
    """Hold every write until the event is set. The list has the thread of each write."""
    write, event, threads = checkpoint.write, threading.Event(), []

    def held(*args, **kwargs):
        threads.append(threading.current_thread())
        assert event.wait(30)
        write(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "write", held)
    return event, threads


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_files_are_those_of_a_save_at_the_time_of_the_copy(
    make_worker, make_batch, tmp_path, gate, dtype, optimizer
):
    event, _ = gate
    worker = make_worker(dtype=dtype, optimizer={"kind": optimizer, "lr": 1e-2})
    worker.train(make_batch(0), LIKELIHOOD)
    worker.take(str(tmp_path / "background"))
    worker.train(make_batch(1), LIKELIHOOD)
    after = {name: master.clone() for name, master in worker._weights.masters.items()}
    event.set()
    asyncio.run(worker.written())
    expected = make_worker(dtype=dtype, optimizer={"kind": optimizer, "lr": 1e-2})
    expected.train(make_batch(0), LIKELIHOOD)
    expected.save(str(tmp_path / "waited"))
    assert files(tmp_path / "background") == files(tmp_path / "waited")
    assert all(torch.equal(after[name], master) for name, master in worker._weights.masters.items())


def test_an_error_of_the_thread_is_raised_by_whoever_waits(make_worker, batch, tmp_path):
    worker = make_worker()
    (tmp_path / "file").write_text("")
    worker.take(str(tmp_path / "file" / "checkpoint"))
    worker.train(batch, LIKELIHOOD)
    with pytest.raises((WhetError, OSError), match="file"):
        asyncio.run(worker.written())
    worker.take(str(tmp_path / "checkpoint"))
    asyncio.run(worker.written())
    make_worker().load(str(tmp_path / "checkpoint"))


def test_without_memory_for_a_copy_it_is_written_before_training_goes_on(
    make_worker, tmp_path, gate, monkeypatch, capsys
):
    event, threads = gate
    event.set()
    monkeypatch.setattr(saving, "available_memory", lambda: 1000)
    worker = make_worker()
    worker.take(str(tmp_path / "checkpoint"))
    assert threads == [threading.current_thread()]
    assert "no host memory for a copy" in capsys.readouterr().out
    asyncio.run(worker.written())
    make_worker().load(str(tmp_path / "checkpoint"))


def test_the_copy_is_freed_once_it_is_written():
    writer, copies = saving.Writer(Ranks(WorkerRank("backend", 0, 1))), []
    held = torch.zeros(10)
    writer.take([("a", held)], 40, lambda tensors: copies.extend(weakref.ref(tensor) for _, tensor in tensors))
    asyncio.run(writer.written())
    for thread in threading.enumerate():
        if thread.name == "whet-backend-save":
            thread.join(60.0)
    assert copies[0]() is None
    assert held.numel() == 10


class Taker:
    """A rank that takes copies of 1,000 bytes."""

    def __init__(self, rank):
        self._writer = saving.Writer(Ranks(rank))

    def takes_in_background(self, available, hosts):
        """Return whether the copy was written by another thread. `hosts`: the name of the machine of each rank."""
        saving.available_memory = lambda: available
        saving.socket.gethostname = lambda: hosts[self._writer._ranks.rank]
        threads = []
        self._writer.take([], 1000, lambda tensors: threads.append(threading.current_thread()))
        asyncio.run(self._writer.written())
        return threads[0] is not threading.current_thread()

    def close(self):
        self._writer._ranks.leave()


def test_ranks_copy_only_where_their_host_has_memory_for_the_copies_of_all(tmp_path):
    with held_processes(tmp_path, {("backend",): 2}, ()) as cluster:
        workers = cluster.worker_group("backend", 2).spawn(f"file:{Path(__file__)}:Taker", {})
        try:
            for available, hosts, expected in (
                (2600, ("a", "a"), True), (2400, ("a", "a"), False), (1300, ("a", "b"), True),
            ):  # fmt: skip
                assert workers.call("takes_in_background", available, hosts) == [expected] * 2
        finally:
            workers.close()
