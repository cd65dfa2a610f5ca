"""Whether an async generator has more, found out without waiting: so a stream can end with its last item."""

import types
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from typing import Any, Final

END: Final = object()


@types.coroutine
def next_item(items: AsyncIterator[Any], wait: Callable[[], None]) -> Generator[Any, Any, Any]:
    """Give the next item, or `END`. Where it is not at hand `wait` is called first; what that raises, `items` gets."""
    step = items.__anext__().__await__()
    resume: Callable[[], Any] = partial(next, step)
    waited = False
    while True:
        try:
            pending = resume()
        except StopIteration as found:
            return found.value
        except StopAsyncIteration:
            return END
        try:
            if not waited:
                waited = True
                wait()
            sent = yield pending
        except BaseException as error:
            resume = partial(step.throw, error)
        else:
            resume = partial(step.send, sent)
