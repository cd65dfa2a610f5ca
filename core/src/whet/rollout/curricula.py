"""The curricula of the environments of a stream; see `whet.interfaces.environment.Adaptive`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite

from whet.data.records import Task
from whet.errors import EpisodeError, WhetError, in_words
from whet.interfaces.environment import Adaptive
from whet.interfaces.state import check_ran
from whet.rollout.routing import Route
from whet.rollout.staleness import Slot


class Curricula:
    """Asks and informs the environments that have a curriculum. If one raises, `fail` ends the stream."""

    def __init__(self, routes: Sequence[Route], fail: Callable[[BaseException, BaseException], None]) -> None:
        for route in routes:
            missing = [name for name in ("difficulty", "adapted", "observe") if not hasattr(route.environment, name)]
            if len(missing) == 1:
                words = f"environment {route.name!r} has a curriculum without the method `{missing[0]}`"
                raise WhetError(f"{words}; add it as `whet.interfaces.environment.Adaptive` documents it")
        self._routes, self._fail = routes, fail
        self._adaptive = {i: e for i, route in enumerate(routes) if isinstance(e := route.environment, Adaptive)}

    def difficulty(self, route: int) -> float | None:
        """Return the difficulty of the next group of an environment. None: it has no curriculum."""
        found = None
        if route in self._adaptive:
            with self._asking(route):
                given = self._adaptive[route].difficulty()
                if not hasattr(given, "__float__") or not isfinite(given):
                    raise EpisodeError(f"`difficulty` returned {given!r:.60}, wanted a finite number")
                found = float(given)
        return found

    def adapted(self, slot: Slot, task: Task) -> Task:
        """Return the task of a group at its difficulty."""
        if slot.difficulty is None:
            return task
        found: object = self._adaptive[slot.route].adapted(task, slot.difficulty)
        if not isinstance(found, Task):
            words = f"`adapted` returned {found!r:.60} at difficulty {slot.difficulty:g}, wanted a Task"
            raise EpisodeError(f"{words}; where `run` alone follows the difficulty, return the task unchanged")
        return found

    def observe(self, ended: Sequence[Slot]) -> None:
        """Show each curriculum the groups of its environment that were consumed."""
        for route, environment in self._adaptive.items():
            with self._asking(route):
                observed: Callable[..., object] = environment.observe
                check_ran(observed([slot.group for slot in ended if slot.route == route and slot.group]), "it")

    @contextmanager
    def _asking(self, route: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            name = self._routes[route].name
            self._fail(WhetError(f"the curriculum of environment {name!r} failed: {in_words(error)}"), error)
