"""By which ways a worker process was asked: over its own connection to the driver, or through a leader.

Each answer goes back by the way by which the call came. One of each of several ranks (`Workers.start_each`) may come by
both ways, where the driver has not heard the answer: it is done once, and answered by both.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define

from whet.runtime.wire import Buffer, encode

Route = Callable[[Sequence[Buffer]], None]
"""Where a message about a call goes to."""


@define
class _Asked:
    slot: int
    once: bool
    """Whether it may come again."""
    routes: list[Route]
    answer: tuple[bool, Sequence[Buffer]] | None = None
    """Whether it was done, and the message that says so, or why not."""


class Ways:
    """The calls of one process. All methods may be called by any thread."""

    def __init__(self, driver: Route) -> None:
        self._driver = driver
        self._calls: dict[int, _Asked] = {}
        """By number: those that came through leaders, and those that may come again."""
        self._oldest: dict[int, int] = {}
        """By slot: what may come again and is older is over."""
        self._lock = threading.Lock()

    def admit(self, message: Mapping[str, Any], route: Route | None) -> bool:
        """Note a call and where a leader waits for the answer, None: the driver does; say whether it is to be done."""
        number, slot, oldest, back = message["number"], message["slot"], message.get("once"), route or self._driver
        with self._lock:
            if oldest is None:
                if route is not None:
                    self._calls[number] = _Asked(slot, False, [route])
                return True
            self._advance(slot, oldest)
            call = self._calls.get(number)
            if call is None and number >= self._oldest[slot]:
                self._calls[number] = _Asked(slot, True, [back])
                return True
            if call is not None and call.answer is None:
                call.routes.append(back)
                return False
        if call is not None and call.answer is not None:
            self._give(number, *call.answer, back)
        elif route is not None:  # its leader was so late that nobody waits for it any more, but that leader
            route(_failed(number))
        return False

    def answer(self, number: int, done: bool, buffers: Sequence[Buffer]) -> None:
        """Give an answer to all that wait for it, the driver first: what was done, or why it was not."""
        with self._lock:
            call = self._calls.get(number)
            routes = [self._driver] if call is None else call.routes
            if call is not None and call.once:
                call.answer = done, buffers
            else:
                self._calls.pop(number, None)
        for route in sorted(routes, key=lambda route: route is not self._driver):  # a leader may hold us up
            self._give(number, done, buffers, route)

    def close(self, slot: int) -> None:
        """Nobody asks the workers of a spawn again: forget what they have answered, and the rest when they have."""
        with self._lock:
            for number, call in [item for item in self._calls.items() if item[1].slot == slot]:
                call.once = False
                if call.answer is not None:
                    del self._calls[number]

    def _give(self, number: int, done: bool, buffers: Sequence[Buffer], route: Route) -> None:
        """A failure is for the driver: that has heard it when a leader waits no longer."""
        if not done and route is not self._driver:
            self._driver(buffers)
            buffers = _failed(number)
        route(buffers)

    def _advance(self, slot: int, oldest: int) -> None:
        """Forget what is over."""
        if oldest > self._oldest.setdefault(slot, oldest):
            self._oldest[slot] = oldest
        over = [n for n, call in self._calls.items() if call.slot == slot and call.answer and n < oldest]
        for number in over:
            del self._calls[number]


def _failed(number: int) -> Sequence[Buffer]:
    return encode({"number": number, "say": "failed", "value": None})
