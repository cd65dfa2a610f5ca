"""Measure what N workers cost the driver: processor time of its process for each step, whatever the workers do.

    python benchmarks/driver_cost.py                      1, 10, 100 and 1000 workers

A step is a batch of 1024 sequences scattered over the ranks, a hand-over of weights begun on all of them, and as many
requests streamed to and answered by all of them. The sockets and messages are those of a run; one helper process plays
all workers, and answers at once.
"""

import argparse
import asyncio
import os
import resource
import select
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whet.cluster.channel import receive, send
from whet.cluster.connection import HostProcess
from whet.cluster.launcher import Cluster, Host
from whet.cluster.wire import decode, encode
from whet.component import Spec
from whet.data.batch import Batch, from_sequences
from whet.data.records import Completion, Request, Sampling
from whet.metrics import mean
from whet.refit.link import Link

SEQUENCES, LENGTH, PROMPT = 1024, 256, 64


class Played:
    """A process that the helper plays: it ends when the helper closes its socket. Keeps `HostProcess`."""

    pid = 0

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def start(self) -> socket.socket:
        """Give the driver's end."""
        return self._end

    def wait(self) -> str:
        """Wait until the helper has closed the other one."""
        closed = select.poll()
        closed.register(self._end, select.POLLRDHUP)
        closed.poll()
        return "it was played to the end"

    def kill(self) -> None:
        """Close it from here."""
        self._end.shutdown(socket.SHUT_RDWR)

    def state(self) -> str:
        """Give nothing: there is no process."""
        return ""

    def show_stacks(self) -> None:
        """Show nothing."""


class Stage:
    """Gives each process its socket. Keeps `Launcher`."""

    def __init__(self, ends: Sequence[socket.socket]) -> None:
        self._ends = list(ends)

    def process(self, host: Host, group: Sequence[Host], log: Path) -> Played:
        """Give the next."""
        return Played(self._ends.pop())

    def import_folders(self) -> dict[str, Any]:
        """Give none."""
        return {"path": [], "add": []}

    def rendezvous(self, role: str, slot: int, processes: Sequence[HostProcess]) -> str:
        """Give a place where nobody goes."""
        return "file:///nowhere"

    def address(self) -> str:
        """Give the loopback."""
        return "127.0.0.1"

    def close(self) -> None:
        """Claim nothing, give nothing back."""


def play(descriptors: Sequence[int]) -> None:
    """Be all workers."""
    waiting = selectors.DefaultSelector()
    for descriptor in descriptors:
        waiting.register(socket.socket(fileno=descriptor), selectors.EVENT_READ)
    metrics = {f"metric/{n}": mean(float(n), 2.0) for n in range(12)}
    while waiting.get_map():
        for key, _ in waiting.select():
            connection: Any = key.fileobj
            try:
                message = decode(receive(connection))
            except (EOFError, OSError):
                waiting.unregister(connection)
                continue
            if message.get("do") == "exit":
                waiting.unregister(connection)
                connection.close()
            if "number" not in message:
                continue
            number, answer = message["number"], None
            if message["do"] == "stream":
                new, logprobs = np.zeros(LENGTH - PROMPT, np.int64), np.zeros(LENGTH - PROMPT, np.float32)
                completions = [Completion(r.id, new, logprobs, "stop", ((0, 1),)) for r in message["args"][0]]
                send(connection, encode({"number": number, "say": "part", "value": completions}))
            elif message["do"] == "call" and message["method"] == "train":
                answer = metrics
            send(connection, encode({"number": number, "say": "done", "value": answer}))


def make_batch() -> Batch:
    """Give a step's batch, on the shapes of a small run of GRPO."""
    columns = {
        "tokens": np.arange(LENGTH), "loss_mask": np.arange(LENGTH) >= PROMPT,
        "advantages": np.ones(LENGTH, np.float32), "sampler_logprobs": np.zeros(LENGTH, np.float32),
    }  # fmt: skip
    groups = [n // 8 for n in range(SEQUENCES)]
    return from_sequences([columns] * SEQUENCES, prompt_lengths=[PROMPT] * SEQUENCES, group=groups)


def measure(workers_wanted: int, steps: int) -> tuple[float, float, int]:
    """Give seconds of processor time and of the clock for a step, and threads of the driver."""
    pairs = [socket.socketpair() for _ in range(workers_wanted)]
    theirs = [str(there.fileno()) for _, there in pairs]
    helper = subprocess.Popen([sys.executable, __file__, "--play", *theirs], pass_fds=[int(n) for n in theirs])
    for _, there in pairs:
        there.close()
    requests = [Request(str(n), np.arange(PROMPT), Sampling(), n) for n in range(SEQUENCES)]
    shards = [(shard, Spec("x:Y")) for shard in make_batch().shard(workers_wanted)]
    with tempfile.TemporaryDirectory() as logs, Cluster(Stage([here for here, _ in pairs]), Path(logs)) as cluster:
        workers = cluster.slice("backend", workers_wanted).spawn("x:Y", {})

        async def generate() -> None:
            async def one(rank: int) -> None:
                async for _ in workers.stream(rank, "generate", requests[rank::workers_wanted], phase="generate"):
                    pass

            await asyncio.gather(*(one(rank) for rank in range(workers_wanted)))

        def step(version: int) -> None:
            workers.scatter("train", shards, phase="train")
            workers.call("send_weights", Link("tcp", "10.0.0.1:1", str(version), version), phase="refit")
            asyncio.run(generate())

        step(0)
        clock, processor = time.perf_counter(), time.process_time()
        for version in range(1, steps + 1):
            step(version)
        spent = (time.process_time() - processor) / steps, (time.perf_counter() - clock) / steps
        threads = threading.active_count()
    helper.kill()
    helper.wait()
    return *spent, threads


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--play", type=int, nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.play:
        play(arguments.play)
        os._exit(0)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{'workers':>8} {'driver cpu/step':>16} {'clock/step':>12} {'threads':>8}")
    for wanted in arguments.workers:
        processor, clock, threads = measure(wanted, arguments.steps)
        print(f"{wanted:8} {processor * 1e3:13.1f} ms {clock * 1e3:9.1f} ms {threads:8}")


if __name__ == "__main__":
    main()
