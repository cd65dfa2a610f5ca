"""The model as an episode sees it: every token of it is recorded.

    prompt      the model's answer   what the environment said   the model's answer
    t t t t t   t t t                t t t t                     t t              tokens
    . . . . .   x x x                . . . .                     x x              loss_mask

History is append-only: the model's tokens are kept as they were sampled, never decoded and tokenised again, and
what an environment says is tokenised once, when it says it.
"""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen

from whet.data.messages import Conversation, Message, Tools, conversation
from whet.data.randomness import derive_seed
from whet.data.records import Completion, IntArray, Reply, Request, Sampling, Trajectory
from whet.errors import EpisodeError, PluginError, WhetError
from whet.interfaces.environment import Address
from whet.rollout.complete import complete

if TYPE_CHECKING:
    from whet.rollout.episode import Assignment, Player


class NoRoom(WhetError):  # noqa: N818 - it says what there is not
    """The context leaves no room for an answer; nothing was appended."""

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(f"a prompt of {length} tokens leaves no room for an answer in {limit}")
        self.length = length
        """Of the prompt, in tokens."""


@frozen(eq=False)
class Turn:
    """One answer of the model, as it is recorded."""

    prompt: IntArray
    """All tokens before it: [prompt]."""
    completion: Completion
    text: str
    """The decoded completion without special tokens."""


class RecordedModel:
    """The model as an episode sees it: one sequence that grows. Obeys `whet.interfaces.environment.Model`."""

    def __init__(
        self, player: "Player", assignment: "Assignment", seat: tuple[int, int],
        family: "list[RecordedModel] | None" = None, tools: Tools = (),
    ) -> None:  # fmt: skip
        """Begin a sequence without history; `seat` is (sample, attempt). Raises `DataError` where the chat template
        knows no tools, and there are some.
        """
        self._tools, self._chat = tools, player.chat.with_tools(tools) if tools else player.chat
        self._player, self._assignment, self._seat = player, assignment, seat
        self.family: list[RecordedModel] = [] if family is None else family
        """All sequences of the episode, in the order they were started."""
        self._fork = len(self.family)
        self.family.append(self)
        self.messages: Conversation = ()
        """The conversation so far, for the chat template and for readers."""
        self._tokens: IntArray = _NO_TOKENS
        self._completions: list[tuple[int, Completion]] = []  # with the position of its first token
        self._marks = [(0, 0)]  # tokens and messages in the beginning and after each completion
        self._full = self._busy = False

    def fork(self) -> "RecordedModel":
        """Start another sequence of the same episode with the history so far.

        The model's tokens up to here count for the loss in the sequence that they were produced in, and there only.
        """
        return self.fork_after(self.turns)

    def fork_after(self, turns: int) -> "RecordedModel":
        """Start another sequence with the history as it was after so many completions of this one."""
        other = self.fresh(self._tools)
        other._tokens, other.messages = self.history(turns)
        other._marks = [self._marks[turns]]
        other._full = self._full and turns == self.turns
        return other

    def fresh(self, tools: Tools = ()) -> "RecordedModel":
        """Start another sequence of the same episode, without history."""
        return RecordedModel(self._player, self._assignment, self._seat, self.family, tools)

    def endpoint(self, *, ignore: Collection[str] = ()) -> AbstractAsyncContextManager[Address]:
        """Give a foreign agent an address at which it asks the model; see `whet.endpoint.episode`."""
        from whet.endpoint.episode import playing

        return playing(self, self._player, ignore)

    @property
    def turns(self) -> int:
        """Completions of this sequence. One that the model never added to leaves no trajectory."""
        return len(self._completions)

    def history(self, turns: int) -> tuple[IntArray, Conversation]:
        """Give tokens and messages as they were after so many completions."""
        tokens, messages = self._marks[turns]
        return self._tokens[:tokens], self.messages[:messages]

    async def reply(self, messages: str | Message | Sequence[Message]) -> Reply:
        """Append messages to the history and let the model answer.

        Where the context leaves no room for an answer, the messages are not appended and the reply has no text
        and the stop `length`, now and from then on. A first prompt that leaves no room is an error.
        """
        try:
            turn = await self.turn(conversation(messages), self._player.sampling)
        except NoRoom as error:
            return await self._out_of_room(error.length)
        return Reply(turn.text, tuple(turn.completion.tokens.tolist()), turn.completion.stop)

    async def turn(self, messages: Conversation, sampling: Sampling, tokens: IntArray | None = None) -> Turn:
        """Append messages and let the model answer. Raises `NoRoom`.

        tokens [appended]: what to append in place of what the chat template makes of the messages.
        """
        if self._busy:
            raise EpisodeError("it asked one sequence twice at the same time; use model.fork() for each")
        self._busy = True
        try:
            return await self._turn(messages, sampling, tokens)
        finally:
            self._busy = False

    async def _turn(self, messages: Conversation, sampling: Sampling, appended: IntArray | None) -> Turn:
        player = self._player
        if self._full:
            raise NoRoom(len(self._tokens), player.max_context)
        prefix, tokens = self._tokens_with(messages, appended)
        room = player.max_context - len(tokens) if player.max_context else sampling.max_tokens
        if room < 1:
            raise NoRoom(len(tokens), player.max_context)
        position = (self._assignment.index, *self._seat, self._fork, len(self._completions))
        request = Request(
            id=f"{player.purpose}-" + "-".join(map(str, position)),
            tokens=tokens,
            sampling=sampling if room >= sampling.max_tokens else evolve(sampling, max_tokens=room),
            seed=derive_seed(player.seed, player.purpose, *position),
            prefix=prefix,
        )
        async with player.gate:
            completion = await complete(player.generator, request, player.chat.decode)
        completion = checked_completion(completion, request)
        text = player.chat.decode(completion.tokens)
        self._completions.append((len(tokens), completion))
        self._tokens = np.concatenate([tokens, completion.tokens])
        self.messages = (*self.messages, *messages, Message("assistant", text))
        self._marks.append((len(self._tokens), len(self.messages)))
        return Turn(tokens, completion, text)

    def _tokens_with(self, messages: Conversation, appended: IntArray | None) -> tuple[str, IntArray]:
        """Give the tokens to continue once messages are appended, and the name of a prompt that samples share."""
        if appended is not None:
            return "", np.concatenate([self._tokens, appended])
        if len(self._tokens):
            ended = int(self._tokens[-1]) in self._chat.stop_tokens
            return "", np.concatenate([self._tokens, self._chat.continuation(self.messages, ended, messages)])
        prompts, key = self._assignment.prompts, (self._tools, messages)
        if key not in prompts:
            name = f"{self._player.purpose}-{self._assignment.index}-{len(prompts)}"
            prompts[key] = (name, self._chat.prompt(messages))
        return prompts[key]

    async def _out_of_room(self, length: int) -> Reply:
        if not len(self._tokens):
            raise EpisodeError(
                f"its prompt of {length} tokens leaves no room for an answer in {self._player.max_context}; "
                "raise rollout.max_context or leave the task out"
            )
        self._full = True
        await asyncio.sleep(0)  # an environment that asks for ever must still meet its deadline
        return Reply("", (), "length")

    def trajectory(self) -> Trajectory:
        """Give what was recorded. A fork begins as prompt: what its parent's sequence trains is not trained again."""
        length = len(self._tokens)
        mask, logprobs = np.zeros(length, np.bool_), np.zeros(length, np.float32)
        versions = np.full(length, -1, np.int32)
        for begin, completion in self._completions:
            end = begin + len(completion.tokens)
            mask[begin:end] = True
            logprobs[begin:end] = completion.logprobs
            for first, version in completion.versions:
                versions[begin + first : end] = version
        prompt_length, stop = self._completions[0][0], self._completions[-1][1].stop
        return Trajectory(self._tokens, mask, logprobs, versions, prompt_length, "length" if self._full else stop)


def checked_completion(completion: Completion, request: Request) -> Completion:
    """Check what a generator gave. Raises `PluginError` saying what is wrong with it."""
    count, limit = len(completion.tokens), request.sampling.max_tokens
    if not 0 < count <= limit:
        raise PluginError(f"the generator gave {count} tokens for request {request.id}, wanted 1 to {limit}")
    if len(completion.logprobs) != count or not np.isfinite(completion.logprobs).all():
        raise PluginError(
            f"the generator gave {len(completion.logprobs)} logprobs for the {count} tokens of request {request.id}, "
            f"wanted a finite one for each; the lowest is {np.min(completion.logprobs, initial=0.0)}"
        )
    if not completion.versions or completion.versions[0][0] != 0:
        raise PluginError(f"the generator gave no weight version for the first token of request {request.id}")
    return completion


_NO_TOKENS: IntArray = np.zeros(0, np.int64)
