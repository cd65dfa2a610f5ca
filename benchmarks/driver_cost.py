"""Measure what N workers cost the driver: processor time of its process for each step, whatever the workers do.

    python benchmarks/driver_cost.py                      1, 10, 100 and 1000 workers

The work of a step is the same for any N, and all N have a part in all of it: a batch of 1024 sequences is sharded and
trained on, a weight sync is sent by all ranks and received by all replicas, and 128 groups of 8 requests are
spread over the replicas as a run does it, which answer group by group. The sockets and messages are those of a run on
one machine; helper processes play the workers, and answer after `--work` seconds: 0 has them compete with the driver
for its cores while it is still asking, as no cluster would.
That workers say again and again that they live costs by the second rather than by the step: `at rest`.
"""

import argparse
import asyncio
import heapq
import itertools
import os
import random
import resource
import select
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from whet.component import Spec
from whet.config.sections import DeadlinesSection
from whet.data import metrics
from whet.data.batch import Batch, from_sequences
from whet.data.metrics import mean
from whet.data.records import Completion, Request, Sampling
from whet.data.spans import Span
from whet.interfaces.weights import TransferSpec
from whet.runtime.channel import Line, receive, send
from whet.runtime.hosts import Host, HostProcess
from whet.runtime.launcher import Cluster
from whet.runtime.wire import decode, encode
from whet_generation.replicas import Replicas

SEQUENCES, GROUP, LENGTH, PROMPT = 1024, 8, 256, 64
HELPERS, REST_SECONDS = 2, 5.0
PARTS = ("train", "send", "receive", "generate")


class Played:
    """A process that the helper plays: it ends when the helper closes its socket. Keeps `HostProcess`."""

    pid, node = 0, ""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def line(self, *ends: Any) -> Line:
        """Return a line that opens with a socket."""
        return Line(*ends)

    def start(self) -> socket.socket:
        """Return the driver's end."""
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
        """Return nothing: there is no process."""
        return ""

    def show_stacks(self) -> None:
        """Show nothing."""


class Stage:
    """Gives each process its socket. Keeps `Launcher`."""

    def __init__(self, ends: Sequence[socket.socket]) -> None:
        self._ends = list(ends)

    def process(self, host: Host, group: Sequence[Host], log: Path) -> Played:
        """Return the next process."""
        return Played(self._ends.pop())

    def fork(self, modules: Mapping[Host, Sequence[str]], logs: Path, patience_seconds: float) -> None:
        """Fork none."""

    def preparations(self) -> list[Span]:
        """Return none."""
        return []

    def import_folders(self, host: Host) -> dict[str, Any]:
        """Return none."""
        return {"path": [], "add": []}

    def rendezvous(self, role: str, slot: int, processes: Sequence[HostProcess]) -> str:
        """Return an address that nothing connects to."""
        return "file:///nowhere"

    def address(self) -> str:
        """Return the loopback."""
        return "127.0.0.1"

    def close(self) -> None:
        """Claim nothing, give nothing back."""


class Player:
    """A worker process without its threads: what it is asked it answers at once."""

    def __init__(self, end: socket.socket, stage: "Troupe") -> None:
        self._end, self._stage = end, stage
        self._sending = threading.Lock()
        self._say(0, "alive", {"doing": "", "seconds": 0.0})
        stage.listen(end, self._hear)

    def _hear(self) -> None:
        message = decode(receive(self._end))
        number = message.get("number", 0)
        match message.get("do"):
            case "call":
                value = _METRICS if message["method"] == "train" else None
                self._stage.work(lambda: self._say(number, "done", value))
            case "build" | "close":
                self._say(number, "done", None)
            case "stream":
                self._stage.work(lambda: self._generate(number, message["args"][0]))
            case "beat":
                self._stage.beat(message["every"], self)
            case "exit":
                self._stage.leave(self._end)

    def _generate(self, number: int, requests: Sequence[Request]) -> None:
        for begin in range(0, len(requests), GROUP):
            self._say(number, "part", [_completion(request) for request in requests[begin : begin + GROUP]])
        self._say(number, "done", None)

    def live(self) -> None:
        """Send a heartbeat."""
        self._say(0, "alive", {"doing": "", "seconds": 0.0})

    def _say(self, number: int, kind: str, value: Any) -> None:
        with self._sending, suppress(OSError):
            send(self._end, encode({"number": number, "say": kind, "value": value}))


class Troupe:
    """Some of the workers, in one process."""

    def __init__(self, descriptors: Sequence[int], work_seconds: float) -> None:
        self._work_seconds = work_seconds
        self._waiting = selectors.DefaultSelector()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._counts = itertools.count()
        self._left = len(descriptors)
        for descriptor in descriptors:
            Player(socket.socket(fileno=descriptor), self)

    def run(self) -> None:
        """Play until all have left."""
        while self._left:
            for key, _ in self._waiting.select(self._pause()):
                try:
                    key.data()
                except (EOFError, OSError):
                    self._waiting.unregister(key.fileobj)
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[-1]()

    def _pause(self) -> float:
        return min(0.1, max(0.0, self._due[0][0] - time.monotonic())) if self._due else 0.1

    def work(self, answer: Callable[[], None]) -> None:
        """Answer when the work is done."""
        if self._work_seconds:
            self._later(self._work_seconds, answer)
        else:
            answer()

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._counts), do))

    def listen(self, end: socket.socket, hear: Callable[[], None]) -> None:
        """Call that whenever something has come."""
        self._waiting.register(end, selectors.EVENT_READ, hear)

    def beat(self, every: float, player: Player) -> None:
        """Send heartbeats of one worker, again and again."""

        def live() -> None:
            player.live()
            self.beat(every, player)

        self._later(every * random.uniform(0.0, 2.0), live)

    def leave(self, end: socket.socket) -> None:
        """End one worker."""
        self._waiting.unregister(end)
        end.close()
        self._left -= 1


_METRICS = {f"metric/{n}": mean(float(n), 2.0) for n in range(12)}


def _completion(request: Request) -> Completion:
    new, logprobs = np.zeros(LENGTH - PROMPT, np.int64), np.zeros(LENGTH - PROMPT, np.float32)
    return Completion(request.id, new, logprobs, "stop", ((0, 1),))


def make_batch() -> Batch:
    """Return a step's batch, on the shapes of a small run of GRPO."""
    columns = {
        "tokens": np.arange(LENGTH), "loss_mask": np.arange(LENGTH) >= PROMPT,
        "advantages": np.ones(LENGTH, np.float32), "sampler_logprobs": np.zeros(LENGTH, np.float32),
    }  # fmt: skip
    groups = [n // GROUP for n in range(SEQUENCES)]
    return from_sequences([columns] * SEQUENCES, prompt_lengths=[PROMPT] * SEQUENCES, group=groups)


@contextmanager
def played(wanted: int, work_seconds: float) -> Iterator[list[socket.socket]]:
    """Return the driver's ends of so many workers."""
    pairs = [socket.socketpair() for _ in range(wanted)]
    theirs = [there.fileno() for _, there in pairs]
    troupes = [theirs[n::HELPERS] for n in range(HELPERS) if theirs[n::HELPERS]]
    helpers = [
        subprocess.Popen(
            [sys.executable, __file__, "--work", str(work_seconds), "--play", *map(str, troupe)], pass_fds=troupe
        )
        for troupe in troupes
    ]
    for _, there in pairs:
        there.close()
    try:
        yield [here for here, _ in pairs]
    finally:
        for helper in helpers:
            helper.kill()
            helper.wait()


def measure(wanted: int, steps: int, work_seconds: float) -> tuple[dict[str, float], float, float, int]:
    """Return median seconds of processor time of a step by part, of the clock, of rest, and the number of threads."""
    sampling = Sampling(max_tokens=LENGTH - PROMPT)
    requests = [Request(str(n), np.arange(PROMPT), sampling, n, str(n // GROUP)) for n in range(SEQUENCES)]
    batch, loss = make_batch(), Spec("x:Y")
    with (
        played(wanted, work_seconds) as ends,
        tempfile.TemporaryDirectory() as logs,
        Cluster(Stage(ends), Path(logs), DeadlinesSection(heartbeat=0.0)) as cluster,
        asyncio.Runner() as runner,
    ):
        workers = cluster.worker_group("backend", wanted).spawn("x:Y", {})
        replicas = Replicas(workers, None)

        async def generate() -> None:
            await asyncio.gather(*map(replicas.generate, requests))

        def train() -> None:
            metrics.merge(workers.scatter("train", [(shard, loss, None) for shard in batch.shard(wanted)]))

        def send_weights(version: int) -> None:
            workers.start(
                "send_weights", TransferSpec("disk", "/tmp", str(version), version), phase="weight_sync"
            ).result()

        def receive_weights(version: int) -> None:
            replicas.receive_weights(TransferSpec("disk", "/tmp", str(version), version), version).result()

        spent: dict[str, list[float]] = {part: [] for part in PARTS}

        def step(version: int) -> None:
            parts = (
                train,
                lambda: send_weights(version),
                lambda: receive_weights(version),
                lambda: runner.run(generate()),
            )
            for name, part in zip(PARTS, parts, strict=True):
                begin = time.process_time()
                part()
                spent[name].append(time.process_time() - begin)

        step(0)
        clock = time.perf_counter()
        for version in range(1, steps + 1):
            step(version)
        clock = (time.perf_counter() - clock) / steps
        medians = {name: statistics.median(seconds[1:]) for name, seconds in spent.items()}
        return medians, clock, rest(cluster, wanted), threading.active_count()


def rest(cluster: Cluster, workers: int) -> float:
    """Return seconds of processor time in a second of waiting while all workers say that they live."""
    for rank in range(workers):
        cluster.connection(f"backend-{rank}").expect_heartbeats(DeadlinesSection().heartbeat, workers)
    time.sleep(1.0)
    processor = time.process_time()
    time.sleep(REST_SECONDS)
    return (time.process_time() - processor) / REST_SECONDS


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--work", type=float, default=0.1, help="seconds that a worker takes to answer")
    parser.add_argument("--play", type=int, nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if arguments.play:
        Troupe(arguments.play, arguments.work).run()
        os._exit(0)
    print(
        f"{'workers':>8} {'driver cpu/step':>16} {' '.join(f'{part:>10}' for part in PARTS)} {'clock/step':>12} "
        f"{'at rest':>11} {'threads':>8}"
    )
    for wanted in arguments.workers:
        spent, clock, resting, threads = measure(wanted, arguments.steps, arguments.work)
        parts = " ".join(f"{seconds * 1e3:7.1f} ms" for seconds in spent.values())
        print(
            f"{wanted:8} {sum(spent.values()) * 1e3:13.1f} ms {parts} {clock * 1e3:9.1f} ms "
            f"{resting * 1e3:6.1f} ms/s {threads:8}",
            flush=True,
        )


if __name__ == "__main__":
    main()
