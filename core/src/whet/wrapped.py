"""Handles that do something around the calls of others: what they leave alone is passed on as it is."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.cluster.slices import Pending
    from whet.component import Spec
    from whet.data.batch import Batch
    from whet.data.records import Completion, Request
    from whet.interfaces.backend import Backend, Weights
    from whet.interfaces.generator import Generator, Running
    from whet.metrics import Metric
    from whet.refit.link import Link


class WrappedBackend:
    """A backend within another handle."""

    def __init__(self, backend: "Backend") -> None:
        self._backend = backend

    def _around(self, phase: str) -> AbstractContextManager[None]:
        """Give what a call is made in; `phase` is the method's name."""
        return nullcontext()

    def train(self, batch: "Batch", loss: "Spec", count_over: "Batch | None" = None) -> "Mapping[str, Metric]":
        """See `Backend.train`."""
        with self._around("train"):
            return self._backend.train(batch, loss, count_over)

    def evaluate(self, batch: "Batch", loss: "Spec") -> "Mapping[str, Metric]":
        """See `Backend.evaluate`."""
        with self._around("evaluate"):
            return self._backend.evaluate(batch, loss)

    def score(self, batch: "Batch", outputs: tuple[str, ...], weights: "Weights" = "policy") -> dict[str, Any]:
        """See `Backend.score`."""
        with self._around("score"):
            return self._backend.score(batch, outputs, weights)

    def send_weights(self, link: "Link") -> "Pending":
        """See `Backend.send_weights`."""
        with self._around("send_weights"):
            return self._backend.send_weights(link)

    def save(self, folder: Path) -> "Pending":
        """See `Backend.save`."""
        with self._around("save"):
            return self._backend.save(folder)

    def load(self, folder: Path) -> None:
        """See `Backend.load`."""
        with self._around("load"):
            self._backend.load(folder)

    def export(self, folder: Path) -> None:
        """See `Backend.export`."""
        with self._around("export"):
            self._backend.export(folder)

    def sleep(self) -> int | None:
        """See `Backend.sleep`."""
        return self._backend.sleep()

    def wake(self) -> None:
        """See `Backend.wake`."""
        self._backend.wake()

    def close(self) -> None:
        """See `Backend.close`."""
        self._backend.close()


class WrappedGenerator:
    """A generator within another handle."""

    def __init__(self, generator: "Generator") -> None:
        self._generator = generator

    async def generate(self, request: "Request") -> "Completion":
        """See `Generator.generate`."""
        return await self._generator.generate(request)

    def receive_weights(self, link: "Link", version: int, running: "Running" = "drain") -> "Pending":
        """See `Generator.receive_weights`."""
        return self._generator.receive_weights(link, version, running)

    def sleep(self) -> int | None:
        """See `Generator.sleep`."""
        return self._generator.sleep()

    def wake(self) -> None:
        """See `Generator.wake`."""
        self._generator.wake()

    def close(self) -> None:
        """See `Generator.close`."""
        self._generator.close()
