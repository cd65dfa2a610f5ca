"""Carries the memory of a process to other nodes, once to each node, in pieces through Ray's object store.

    driver ── Carriers ──> MemoryCarrier on the sender's node        read(memory, offset) -> a piece, put once
                    └────> MemoryCarrier on each receiving node      write(piece) to anonymous memory of its own

Receivers map the memory of their node's carrier as they map that of a sender on their own node.
"""

import mmap
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

import numpy as np

from whet.errors import in_words
from whet.interfaces.weights import Copy
from whet_weights import shared_pages

PIECE_BYTES: Final = 10 << 20
"""Size of a piece: a multiple of the size of a page, and of the 5 MiB in which Ray sends an object to another node."""
_WINDOW: Final = 6
"""Pieces that are under way at one time. They bound the part of the object store that a transfer takes."""


class MemoryCarrier:
    """An actor, one on each node. Its memory is freed when it ends, in whatever way."""

    def __init__(self) -> None:
        self._copies: dict[str, tuple[int, Any]] = {}
        """The descriptor and the mapping of each copy, by its key."""

    def open(self, key: str, size: int) -> str:
        """Make room for a copy, in place of the last one with that key, and return its name."""
        descriptor, mapping = self._copies.get(key) or (shared_pages.create(), None)
        if mapping is None or len(mapping) < size:
            shared_pages.reserve(descriptor, max(size, 1))
            mapping = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
            self._copies[key] = descriptor, mapping
        return shared_pages.name_of(descriptor)

    def read(self, memory: str, offset: int, size: int) -> Any:
        """Return a piece of the memory of a process on this node."""
        path = shared_pages.find(memory)
        assert path is not None
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), size, offset=offset, access=mmap.ACCESS_READ), np.uint8)

    def write(self, key: str, offset: int, piece: Any) -> None:
        """Write a piece to a copy."""
        self._copies[key][1][offset : offset + len(piece)] = piece


class Carriers:
    """The driver's handles of the carriers."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._lock = threading.Lock()

    def copy(self, memory: str, size: int, node: str, others: Collection[str], seconds: float) -> Mapping[str, Copy]:
        """Copy a memory of a process on `node` to each of the other nodes. Return the copies by node.

        A node that is lost, or has no room, gets no copy, and the others do. `seconds`: the limit for the whole.
        """
        ray, key, until = import_module("ray"), f"{node}/{memory}", time.monotonic() + seconds
        found: dict[str, Copy] = {}

        def take(calls: Mapping[str, Any]) -> None:
            for other, call in calls.items():
                if other not in found or not found[other].failure:
                    try:
                        name = ray.get(call, timeout=max(0.0, until - time.monotonic()))
                        found.setdefault(other, Copy(name))
                    except ray.exceptions.RayError as error:
                        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                        found[other] = Copy(failure=in_words(cause).splitlines()[0])
                        self._forget(other)

        take({other: self._actor(other).open.remote(key, size) for other in others})
        waiting = deque[Mapping[str, Any]]()
        for offset in range(0, size, PIECE_BYTES):
            here = [other for other in others if not found[other].failure]
            if not here:
                break
            piece = self._actor(node).read.remote(memory, offset, min(PIECE_BYTES, size - offset))
            waiting.append({other: self._actor(other).write.remote(key, offset, piece) for other in here})
            if len(waiting) >= _WINDOW:
                take(waiting.popleft())
        for calls in waiting:
            take(calls)
        if found and all(copy.failure for copy in found.values()):  # then the carrier that reads may be what was lost
            self._forget(node)
        return found

    def close(self) -> None:
        """End the carriers, which frees their memory."""
        with self._lock:
            nodes = list(self._actors)
        for node in nodes:
            self._forget(node)

    def _actor(self, node: str) -> Any:
        """Return the carrier of a node. Start it at the first call."""
        ray = import_module("ray")
        strategies = import_module("ray.util.scheduling_strategies")
        with self._lock:
            if node not in self._actors:
                place = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
                options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": place}
                self._actors[node] = ray.remote(MemoryCarrier).options(**options).remote()
            return self._actors[node]

    def _forget(self, node: str) -> None:
        with self._lock:
            actor = self._actors.pop(node, None)
        if actor is not None:
            with suppress(Exception):  # Ray may be gone, and the actor with it
                import_module("ray").kill(actor)
