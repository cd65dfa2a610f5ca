"""Records the questions that graders could not decide, for the episode that asked them.

    with noted() as reasons:                # the episode
        await environment.run(task, model)  # -> ... -> GraderPool.call -> note("...")
    reasons                                 # ["..."]

The call of `note` may be anywhere below the environment. Outside an episode it has no effect.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from whet.errors import Undecided

_REASONS: ContextVar[list[str] | None] = ContextVar("whet_undecided", default=None)


@contextmanager
def noted() -> Iterator[list[str]]:
    """Collect the reasons noted in this context, and in the asyncio tasks and threads that it starts."""
    reasons: list[str] = []
    token = _REASONS.set(reasons)
    try:
        yield reasons
    finally:
        _REASONS.reset(token)


def note(reason: str) -> None:
    """Add a reason to the running episode, if there is one."""
    reasons = _REASONS.get()
    if reasons is not None:
        reasons.append(reason)


def note_undecided(error: BaseException) -> None:
    """Add the reason of an `Undecided`, unless its grader has noted one. Do nothing for other errors."""
    if isinstance(error, Undecided) and not _REASONS.get():
        note(str(error))
