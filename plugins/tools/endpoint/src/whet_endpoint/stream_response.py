"""Sends one response as server-sent events while it is sampled.

A failure before the first token is an answer with its own status. Later ones are events, as the status has been sent:
no stream ends without its last event.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from functools import partial

from attrs import define, field

from whet.data.records import Progress
from whet_endpoint.choices import Choice, Likeliest, Tokens, tokens_of
from whet_endpoint.dialects import Writer
from whet_endpoint.errors import ApiError, failed_inside
from whet_endpoint.requests import ApiRequest
from whet_endpoint.session import Session
from whet_endpoint.streaming import TOKENS_AT_A_TIME, Piece, RunningText

Report = tuple[int, Progress]


@define(eq=False)
class _Running:
    """A choice that is sampled."""

    text: RunningText
    unsent: list[Tokens] = field(factory=list)
    """Tokens since the last piece."""

    def add(self, tokens: Tokens) -> Iterator[Piece]:
        self.unsent.append(tokens)
        return self.text.add(tokens.tokens)

    def cut(self, count: int) -> None:
        """Leave out the unsent tokens that were reported beyond so many: those behind a stop string."""
        beyond = max(0, self.text.count - count)
        while self.unsent and beyond:
            last = self.unsent.pop()
            kept = max(0, len(last.tokens) - beyond)
            beyond -= len(last.tokens) - kept
            if kept:
                self.unsent.append(last.part(slice(kept)))

    def taken(self) -> list[Tokens]:
        unsent, self.unsent = self.unsent, []
        return unsent


async def events(session: Session, request: ApiRequest, name: str, writer: Writer) -> AsyncGenerator[bytes, None]:
    """Yield the events of a response, some at a time. Only a failure before the first ones is raised.

    Closing the iterator cancels the request.
    """
    reports: asyncio.Queue[Report | None] = asyncio.Queue()
    running = [_Running(RunningText(request, session.responder.chat)) for _ in range(request.count)]
    respond = session.respond(request, name, lambda index, progress: reports.put_nowait((index, progress)))
    task = asyncio.get_running_loop().create_task(respond)
    task.add_done_callback(partial(lambda queue, _: queue.put_nowait(None), reports))
    begun = False
    try:
        async for report in _until_none(reports):
            head = b"" if begun else writer.begin()
            if data := head + _reported(writer, running, *report):
                begun = True
                yield data
        choices = await task
        head, begun = b"" if begun else writer.begin(), True
        yield head
        for data in _rest(writer, running, choices):
            yield data
    except Exception as error:  # the edge: a client learns nothing of an error inside
        if not begun:
            raise
        yield writer.failed(error if isinstance(error, ApiError) else failed_inside(error))
    finally:
        task.cancel()


async def _until_none(queue: "asyncio.Queue[Report | None]") -> AsyncIterator[Report]:
    while (found := await queue.get()) is not None:
        yield found


def _reported(writer: Writer, running: list[_Running], index: int, progress: Progress) -> bytes:
    """Return the events of reported tokens. Tokens that were reported before a replica was lost are left out."""
    one = running[index]
    known = one.text.count - progress.begin
    if known < 0 or known >= len(progress.tokens):
        return b""
    top = Likeliest(progress.likeliest[known:], progress.likeliest_logprobs[known:])
    tokens = Tokens(progress.tokens[known:], progress.logprobs[known:], top if progress.likeliest.shape[1] else None)
    return _written(writer, index, one, one.add(tokens))


def _rest(writer: Writer, running: list[_Running], choices: list[Choice]) -> Iterator[bytes]:
    """Yield the events of the tokens that were not reported, and of the end."""
    for index, (choice, one) in enumerate(zip(choices, running, strict=True)):
        left = tokens_of(choice, one.text.count)
        for begin in range(0, len(left.tokens), TOKENS_AT_A_TIME):
            yield _written(writer, index, one, one.add(left.part(slice(begin, begin + TOKENS_AT_A_TIME))))
        one.cut(len(choice.completion.tokens))
        yield _written(writer, index, one, one.text.end(choice))
    yield writer.end(choices, [one.taken() for one in running])


def _written(writer: Writer, index: int, one: _Running, pieces: Iterator[Piece]) -> bytes:
    return b"".join([writer.piece(index, piece, one.taken()) for piece in pieces])
