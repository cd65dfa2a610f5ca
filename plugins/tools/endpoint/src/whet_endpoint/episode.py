"""The endpoint of an episode: an external agent plays it, and its requests are turns of recorded sequences.

    request   [u1]              -> a1    the first sequence            u1 a1
              [u1 a1 u2]        -> a2    continues it                  u1 a1 u2 a2
              [u1 a1 u3]        -> a3    a fork of it after a1         u1 a1 u3 a3
              [u1 xx u2]        -> a4    xx was never sampled:         u1 xx u2 a4
                                         another sequence

Conversations are compared as they were shown, except for white space around the model's text and the ids of calls. The
model's reasoning may be sent back or left out. A recorded sequence continues with its own tokens, never with tokens of
the text that the agent sends back. A request with other tools is another conversation, because its prompt begins
differently.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from hashlib import blake2b
from types import TracebackType
from typing import TypeVar

import numpy as np
from attrs import frozen

from whet.data.messages import Conversation, Image, Message, Tools
from whet.data.records import Completion, IntArray, Progress, Turn
from whet.errors import ClusterGone, ContextFull, DataError, WhetError, WorkerError, in_words
from whet.interfaces.chat import Chat
from whet.interfaces.endpoint import RecordedSequence
from whet.interfaces.environment import Address
from whet.interfaces.generator import Listener, listening
from whet.rollout.event_loop import gather_or_cancel
from whet_endpoint.choices import Choice
from whet_endpoint.errors import ApiError
from whet_endpoint.listener import Listener as AddressListener
from whet_endpoint.reading import check_tools, read_choice, text_prompt, without_tags
from whet_endpoint.requests import ApiRequest, Rules
from whet_endpoint.session import Listen

logger = logging.getLogger(__name__)

Made = TypeVar("Made", Turn, Completion)


@asynccontextmanager
async def open_episode(
    listener: AddressListener, sequence: RecordedSequence, chat: Chat, rules: Rules
) -> AsyncIterator[Address]:
    """Open an endpoint for an episode until the context ends. A failure of the model ends the body and is raised."""
    scope = FailureScope()
    responder = EpisodeResponder(sequence, chat, rules, scope)
    async with scope, listener.open(responder, responder.conversations) as address:
        yield address


class FailureScope(AbstractAsyncContextManager["FailureScope"]):
    """Cancels its body when another task reports a failure, and raises the failure, as a task group does."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.full: ContextFull | None = None
        """Why the last request was refused, if the context had no room for it."""
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0

    async def __aenter__(self) -> "FailureScope":
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task else 0
        return self

    def fail(self, error: BaseException) -> None:
        """Report a failure. The first one is raised."""
        if self.error is None:
            self.error = error
            if self._task is not None:
                self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        own = isinstance(value, WorkerError | ClusterGone)  # a failure of the run is none of the agent's
        if self.full is not None and self.error is None and isinstance(value, Exception) and not own:
            logger.warning("an episode ends where its context was full, with the error: %s", in_words(value))
            raise self.full from value  # the agent does not go on after the refusal: the episode ends here
        if self.error is None or task is None:
            return
        if task.uncancel() > self._cancelling and kind is asyncio.CancelledError:
            return  # something else, such as a deadline, cancels the body too
        raise self.error from value


@frozen(eq=False)
class _Place:
    """A point of a sequence at which it can be continued."""

    sequence: RecordedSequence
    turns: int
    """Responses of the sequence up to this point."""

    @property
    def tokens(self) -> IntArray:
        return self.sequence.history(self.turns)[0]


class EpisodeResponder:
    """Plays requests as turns of an episode's sequences. Obeys `whet_endpoint.session.Responder`."""

    def __init__(self, sequence: RecordedSequence, chat: Chat, rules: Rules, scope: FailureScope) -> None:
        self.rules, self.chat, self._scope = rules, chat, scope
        self._first = sequence
        begin = _Place(sequence, sequence.turns)
        self._places = {_chain(sequence.messages, (), reasoning)[-1]: begin for reasoning in (False, True)}
        """By the digest of the conversation up to the place, with the model's reasoning and without."""
        self._all = [begin]
        self._busy = set[RecordedSequence]()
        """Sequences whose next response is being sampled."""
        self._sequences = [sequence]

    def conversations(self) -> tuple[Conversation, ...]:
        """Return the conversation of each sequence that has a response."""
        return tuple(sequence.messages for sequence in self._sequences if sequence.turns)

    async def respond(self, request: ApiRequest, name: str, listen: Listen | None) -> list[Choice]:
        """Play a request as a turn. A failure that is not the request's own fails the episode."""
        self._scope.full = None
        try:
            return await self._choices(request, listen)
        except ApiError:
            raise
        except ContextFull as error:
            self._scope.full = error if self.conversations() else None
            raise ApiError(400, str(error), "messages", "context_length_exceeded") from error
        except Exception as error:  # the edge: any other error fails the episode, and the agent learns nothing of it
            if type(error) is WhetError:  # the generator refuses the request, e.g. for a token that the model lacks
                raise ApiError(400, str(error)) from error
            self._scope.fail(error)
            raise ApiError(503, "the model cannot answer; the episode ends here", code="model_failed") from error

    async def _choices(self, request: ApiRequest, listen: Listen | None) -> list[Choice]:
        check_tools(request, self.chat)
        place, messages, tokens = self._recorded(request)
        chosen: list[RecordedSequence] = []
        for _ in range(request.count):
            chosen.append(self._sequence(place, request.tools))
            self._busy.add(chosen[-1])
        before = [one.turns for one in chosen]
        try:
            turns = await gather_or_cancel(
                heard(partial(one.turn, messages, request.sampling, tokens), request, i, listen)
                for i, one in enumerate(chosen)
            )
        except BaseException as error:
            for one in (one for one, count in zip(chosen, before, strict=True) if one.turns > count):
                one.forget()  # the agent does not get this choice: it began anew, or another one is not there
            if isinstance(error, DataError):
                raise ApiError(400, str(error), "messages") from error
            raise
        finally:
            self._busy.difference_update(chosen)
        choices = [read_choice(request, self.chat, turn.prompt, turn.completion) for turn in turns]
        for one, choice in zip(chosen, choices, strict=True):
            self._remember(one, request, choice)
        return choices

    def _recorded(self, request: ApiRequest) -> tuple[_Place | None, Conversation, IntArray | None]:
        """Return the place up to which a prompt is recorded, None without one, and what is to be appended there:
        messages, and tokens where the chat template is not to be used.
        """
        prompt = request.prompt
        if isinstance(prompt, tuple):
            chains = [_chain(prompt, request.tools, reasoning) for reasoning in (True, False)]
            known = ((n, chain[n]) for n in reversed(range(len(prompt))) for chain in chains)
            length, key = next(((n, key) for n, key in known if key in self._places), (0, b"none"))
            return self._places.get(key), prompt[length:], None
        if isinstance(prompt, str):
            return None, (Message("user", prompt),), text_prompt(self.chat, prompt)
        within = [p for p in self._all if p.turns and np.array_equal(prompt[: len(p.tokens)], p.tokens)]
        place = max(within, key=lambda p: len(p.tokens), default=None)
        rest = prompt[len(place.tokens) :] if place else prompt
        return place, (Message("user", self.chat.decode(rest)),) if len(rest) else (), rest

    def _sequence(self, place: _Place | None, tools: Tools) -> RecordedSequence:
        """Return the sequence that continues a place: its own while it still ends there, otherwise another."""
        if place is None:
            one = self._first.fresh(tools)
        elif place.sequence.turns == place.turns and place.sequence not in self._busy:
            return place.sequence
        else:
            one = place.sequence.fork(turns=place.turns)
        self._sequences.append(one)
        return one

    def _remember(self, sequence: RecordedSequence, request: ApiRequest, choice: Choice) -> None:
        place = _Place(sequence, sequence.turns)
        self._all.append(place)
        if isinstance(request.prompt, tuple):
            talk = (*request.prompt, choice.message)
            for reasoning in (False, True):
                self._places[_chain(talk, request.tools, reasoning)[-1]] = place


async def heard(
    turn: Callable[[], Awaitable[Made]], request: ApiRequest, index: int, listen: Listen | None
) -> Made:  # fmt: skip
    """Await what a choice is made of, and pass on its tokens as they are reported.

    Raises `ApiError` where a stream got other tokens than the completion has, as after the loss of a replica.
    """
    if listen is None:
        return await turn()
    told: list[int] = []

    def tell(progress: Progress) -> None:
        known = len(told) - progress.begin
        told.extend(progress.tokens[known:].tolist() if known >= 0 else ())
        listen(index, progress)

    with listening(Listener(tell, request.likeliest)):
        made = await turn()
    completion = made.completion if isinstance(made, Turn) else made
    both = min(len(told), len(completion.tokens))  # what was told behind a stop string is no part of the completion
    if request.stream and completion.tokens[:both].tolist() != told[:both]:
        raise ApiError(503, "the response began anew on its way; send the request again", code="began_anew")
    return made


def _chain(messages: Conversation, tools: Tools, reasoning: bool) -> list[bytes]:
    """Return a digest of no message, of the first, of the first two, and so on: [messages + 1]. `reasoning`: with the
    reasoning of the assistant.
    """
    chain = [blake2b("\n".join(tools).encode()).digest() if tools else b""]
    for message in messages:
        text = message.text
        if message.role == "assistant":
            said = without_tags(message)
            thought = f"{said.reasoning.strip()}\n\n" if said.reasoning and reasoning else ""
            text = thought + said.text.strip()
        calls = [[call.name, json.loads(call.arguments)] for call in message.calls]
        images = [[i, part.url] for i, part in enumerate(message.content) if isinstance(part, Image)]
        shown = f"\n{message.role}{json.dumps(images) if images else ''}\n{text}"
        shown += f"\n{json.dumps(calls, sort_keys=True)}" * bool(calls)
        chain.append(blake2b(chain[-1] + shown.encode(errors="surrogatepass")).digest())
    return chain
