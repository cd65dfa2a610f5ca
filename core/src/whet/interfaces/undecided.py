"""Records the questions that graders could not decide, for the episode that asked them.

    with noted() as reasons:                # the episode
        await environment.run(task, model)  # -> ... -> GraderPool.call -> note("...")
    reasons                                 # ["..."]

The call of `note` may be anywhere below the environment. Outside an episode it has no effect.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
