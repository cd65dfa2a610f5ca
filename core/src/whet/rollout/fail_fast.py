"""Detects a broken environment: code that raises the same error at the same place in every episode.

Single failures are retried and counted. But if every first attempt at the first groups fails in the same way, more
episodes would cost hours and fail, too. An environment passes as soon as one of these episodes ends differently. Until
then no episode of it is retried while a first attempt is running.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from whet.errors import ContextFull, EpisodeError, InfrastructureError, Undecided, WorkerError, in_words, place_of

FIRST_GROUPS = 8
"""Number of groups that decide, in the order in which they begin. In evaluation a task with its samples is a group."""


class BrokenEnvironment(EpisodeError):  # noqa: N818 - it says what is to be corrected
    """All episodes of an environment's first groups raised the same error. The cause is the last one."""


def is_infrastructure(error: BaseException) -> bool:
    """Return whether an error means that the infrastructure failed: a sandbox, a server, a grader's process."""
    return isinstance(error, InfrastructureError | ConnectionError | TimeoutError)


@contextmanager
def ungrouped() -> Iterator[None]:
    """Replace an exception group, e.g. of an `asyncio.TaskGroup`, with one of its errors if that error describes the
    group.

    A `WorkerError` replaces any group that contains it. An `Undecided`, a `ContextFull`, or an error of the
    infrastructure replaces only a group of such errors: any other error in the group counts more.
    """
    try:
        yield
    except ExceptionGroup as group:
        found = list(_leaves(group))
        for error in found:
            if isinstance(error, WorkerError):
                raise error from group
        if all(isinstance(error, Undecided | ContextFull) for error in found) or all(map(is_infrastructure, found)):
            raise found[0] from group
        raise


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error


class FailFast:
    """The first attempts at the first episodes of one environment. For use from one event loop."""

    def __init__(self, environment: str) -> None:
        self._environment = environment
        self._groups: set[int] = set()
        self._begun = self._failed = 0
        self._kind = ""
        """Exception type and place of the errors so far. An error of another process has them as `origin`."""
        self._passed = self._broken = False
        self._settled = asyncio.Event()
        """Set while no first attempt is running that could still decide."""

    @contextmanager
    def first_attempt(self, group: int) -> Iterator[None]:
        """Watch the first attempt at an episode. Raises `BrokenEnvironment` in place of the error that decides."""
        if self._passed or (self._complete and group not in self._groups):
            yield
            return
        self._groups.add(group)
        self._begun += 1
        self._settled.clear()
        try:
            yield
            self._passed = True
        except (asyncio.CancelledError, WorkerError):  # says nothing about the environment
            self._begun -= 1
            raise
        except BaseException as error:
            self._count(error)
            raise
        finally:
            if self._passed or (self._failed == self._begun and not self._broken):
                self._settled.set()

    async def before_another(self) -> None:
        """Wait until it is known whether retrying an episode makes sense."""
        await self._settled.wait()

    @property
    def _complete(self) -> bool:
        return len(self._groups) == FIRST_GROUPS

    def _count(self, error: BaseException) -> None:
        kind = getattr(error, "origin", f"{type(error).__qualname__} at {place_of(error)}")
        self._kind = self._kind or kind
        self._passed = self._passed or kind != self._kind or is_infrastructure(error)
        self._failed += 1
        self._broken = not self._passed and self._failed == self._begun and self._complete
        if self._broken:
            raise BrokenEnvironment(
                f"environment {self._environment!r} fails wherever it is played: all {self._failed} episodes of its "
                f"first {FIRST_GROUPS} groups failed alike; the last: {in_words(error)}"
            ) from error
