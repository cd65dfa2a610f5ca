"""What graders could not decide about: noted for the episode that asked them, wherever in its environment that was.

    with noted() as reasons:                # the episode
        await environment.run(task, model)  # -> ... -> GraderPool.call -> note("...")
    reasons                                 # ["..."]

Outside an episode a note goes nowhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_REASONS: ContextVar[list[str] | None] = ContextVar("whet_undecided", default=None)


@contextmanager
def noted() -> Iterator[list[str]]:
    """Collect the reasons that are noted in this context, and in tasks and threads that it starts through asyncio."""
    reasons: list[str] = []
    token = _REASONS.set(reasons)
    try:
        yield reasons
    finally:
        _REASONS.reset(token)


def note(reason: str) -> None:
    """Add a reason to the episode under way, where there is one."""
    reasons = _REASONS.get()
    if reasons is not None:
        reasons.append(reason)
