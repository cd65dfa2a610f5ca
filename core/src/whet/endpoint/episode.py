"""An episode played by a foreign agent: what it asks over HTTP is asked of the recorded model.

    it asks   [u1]              -> a1    the model's own sequence           u1 a1
              [u1 a1 u2]        -> a2    goes on with it                    u1 a1 u2 a2
              [u1 a1 u3]        -> a3    a fork: begins with u1 a1          u1 a1 u3 a3
              [u1 xx u2]        -> a4    was never said: another sequence   u1 xx u2 a4

Conversations are compared as they were shown, white space around the model's words and the ids of calls aside. What was
recorded is continued with its own tokens, never with those of the text that the agent sends back. One with other tools
is another conversation, for its beginning differs.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from whet.data.chat import RewrittenHistory
from whet.data.messages import Conversation, Message, Tools
from whet.data.records import IntArray
from whet.endpoint import told
from whet.endpoint.asked import Asked, Rules, check_ignored
from whet.endpoint.calls import answered, check_tools
from whet.endpoint.refused import Refused
from whet.endpoint.told import Answer
from whet.errors import DataError
from whet.interfaces.environment import Address
from whet.rollout.recorded import NoRoom, RecordedModel
from whet.runtime.event_loop import gather_or_cancel

if TYPE_CHECKING:
    from whet.rollout.episode import Chat, Player


@asynccontextmanager
async def playing(model: RecordedModel, player: "Player", ignore: Collection[str]) -> AsyncIterator[Address]:
    """Give a foreign agent an address meanwhile. What fails there ends the body, and is raised."""
    failing = Failing()
    line = EpisodeLine(model, player.chat, Rules(player.sampling, fixed=True, ignore=check_ignored(ignore)), failing)
    async with failing, player.listener.open(line, line.conversations) as address:
        yield address


class Failing(AbstractAsyncContextManager["Failing"]):
    """Ends its body when another task reports a failure, and raises that, as a group of tasks does."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0

    async def __aenter__(self) -> "Failing":
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task else 0
        return self

    def fail(self, error: BaseException) -> None:
        """Report a failure; the first counts."""
        if self.error is None:
            self.error = error
            if self._task is not None:
                self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self.error is None or task is None:
            return
        if task.uncancel() > self._cancelling and kind is asyncio.CancelledError:
            return  # somebody else, such as a deadline, wants it to end, too
        raise self.error from value


@frozen(eq=False)
class _Place:
    """A point of a sequence from which it can be continued."""

    sequence: RecordedModel
    turns: int
    """Of the sequence when it stood here."""

    @property
    def tokens(self) -> IntArray:
        return self.sequence.history(self.turns)[0]


class EpisodeLine:
    """Plays requests as turns of an episode's sequences. See `whet.endpoint.listener.Line`."""

    def __init__(self, model: RecordedModel, chat: "Chat", rules: Rules, failing: Failing) -> None:
        self.rules, self._chat, self._failing = rules, chat, failing
        self._model = model
        begin = _Place(model, model.turns)
        self._places = {_chain(model.messages)[-1]: begin}
        """By what was said up to there."""
        self._all = [begin]
        self._asked = set[RecordedModel]()
        """Sequences whose answer is under way."""
        self._sequences = [model]

    def conversations(self) -> tuple[Conversation, ...]:
        """Give what was said in each sequence in which the model answered."""
        return tuple(sequence.messages for sequence in self._sequences if sequence.turns)

    async def reply(self, asked: Asked, name: str) -> dict[str, Any]:
        """Play a request as a turn. What fails beyond the request fails the episode."""
        try:
            return told.reply(asked, name, await self._answers(asked), self._chat.pieces)
        except Refused:
            raise
        except NoRoom as error:
            raise Refused(400, str(error), "messages", "context_length_exceeded") from error
        except Exception as error:  # the edge: whatever it is, the episode fails with it, and the agent is told no more
            self._failing.fail(error)
            raise Refused(503, "the model cannot answer; the episode ends here", code="model_failed") from error

    async def _answers(self, asked: Asked) -> list[Answer]:
        check_tools(asked, self._chat)
        place, messages, tokens = self._found(asked)
        chosen: list[RecordedModel] = []
        for _ in range(asked.count):
            chosen.append(self._sequence(place, asked.tools))
            self._asked.add(chosen[-1])
        try:
            turns = await gather_or_cancel(one.turn(messages, asked.sampling, tokens) for one in chosen)
        except RewrittenHistory:
            raise
        except DataError as error:
            raise Refused(400, str(error), "messages") from error
        finally:
            self._asked.difference_update(chosen)
        answers = [answered(asked, self._chat, turn.prompt, turn.completion) for turn in turns]
        for one, answer in zip(chosen, answers, strict=True):
            self._note(one, asked, answer)
        return answers

    def _found(self, asked: Asked) -> tuple[_Place | None, Conversation, IntArray | None]:
        """Find how much of a prompt is recorded; give that place, None where nothing is, and what is to be appended:
        messages, and tokens in their place where there is no use of the chat template.
        """
        prompt = asked.prompt
        if isinstance(prompt, tuple):
            keys = _chain(prompt, asked.tools)
            length = next((n for n in reversed(range(len(prompt))) if keys[n] in self._places), None)
            return (None, prompt, None) if length is None else (self._places[keys[length]], prompt[length:], None)
        if isinstance(prompt, str):
            return None, (Message("user", prompt),), self._chat.encode(prompt)
        within = [p for p in self._all if p.turns and np.array_equal(prompt[: len(p.tokens)], p.tokens)]
        place = max(within, key=lambda p: len(p.tokens), default=None)
        rest = prompt[len(place.tokens) :] if place else prompt
        return place, (Message("user", self._chat.decode(rest)),) if len(rest) else (), rest

    def _sequence(self, place: _Place | None, tools: Tools) -> RecordedModel:
        """Give the sequence that goes on from a place: its own where it still stands there, else another."""
        if place is None:
            one = self._model.fresh(tools)
        elif place.sequence.turns == place.turns and place.sequence not in self._asked:
            return place.sequence
        else:
            one = place.sequence.fork_after(place.turns)
        self._sequences.append(one)
        return one

    def _note(self, sequence: RecordedModel, asked: Asked, answer: Answer) -> None:
        place = _Place(sequence, sequence.turns)
        self._all.append(place)
        if isinstance(asked.prompt, tuple):
            said = Message("assistant", answer.text, answer.calls)
            self._places[_chain((*asked.prompt, said), asked.tools)[-1]] = place


def _chain(messages: Conversation, tools: Tools = ()) -> list[bytes]:
    """Give a digest of no message, of the first, of the first two, and so on: [messages + 1]."""
    chain = [blake2b("\n".join(tools).encode()).digest() if tools else b""]
    for message in messages:
        text = message.text.strip() if message.role == "assistant" else message.text
        calls = [[call.name, json.loads(call.arguments)] for call in message.calls]
        said = f"\n{message.role}\n{text}" + f"\n{json.dumps(calls, sort_keys=True)}" * bool(calls)
        chain.append(blake2b(chain[-1] + said.encode(errors="surrogatepass")).digest())
    return chain
