"""A worker that continues sequences with letters at random."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from whet.data.records import Request
from whet_generation.serial import SerialGenerator, SerialWorker


@frozen
class Letters:
    """How many letters there are."""

    count: int = 26
    """The first letters of the alphabet."""


class LettersWorker(SerialWorker):
    """Takes weights whose file exists, and holds none."""

    def start(self) -> None:
        """Record the place of the weights."""
        self.positions, self.places = 400, [self.rank.device]

    def continued(self, request: Request) -> Iterator[tuple[int, float]]:
        """Draw letters from the seed of the request."""
        draws = np.random.default_rng(request.seed if request.sampling.temperature else 0)
        while True:
            yield int(draws.integers(97, 97 + self.config.count)), -float(np.log(self.config.count))

    def decode(self, tokens: list[int]) -> str:
        """Return the letters."""
        return bytes(tokens).decode(errors="replace")

    def take(self, spec: Any) -> None:
        """Refuse weights that were not sent."""
        if not any(Path(spec.address).iterdir()):
            raise ValueError("nothing was sent")

    def move(self, device: str) -> None:
        """Record the place of the weights."""
        self.places.append(device)


class LettersGenerator(SerialGenerator):
    """The handle on the driver."""

    worker = f"file:{__file__}:LettersWorker"
