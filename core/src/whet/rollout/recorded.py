"""The model as an episode sees it. Every token of the episode is recorded.

    prompt      the model's response  the environment's message  the model's response
    t t t t t   t t t                 t t t t                    t t              tokens
    . . . . .   x x x                 . . . .                    x x              loss_mask

The model's tokens are kept as they were sampled, never decoded and tokenised again. A message of the environment is
tokenised once, when it is appended. If the chat template rewrites history, the conversation continues in another
sequence. That sequence begins with a new prompt, and only its own responses are trained on.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from attrs import define, evolve, field, frozen

from whet.data.messages import Conversation, Message, Tools, conversation
from whet.data.randomness import derive_seed
from whet.data.records import (
    Completion,
    IntArray,
    Reply,
    Request,
    Sampling,
    Stop,
    Task,
    Trajectory,
    Turn,
    recordable,
    stops,
    with_ids,
)
from whet.errors import ContextFull, DataError, EpisodeError, PluginError, RewrittenHistory, WhetError
from whet.interfaces.chat import Chat
from whet.interfaces.clock import on_loop
from whet.interfaces.endpoint import Endpoints
from whet.interfaces.environment import Address, EpisodeInfo, checked_rewards
from whet.plugins.endpoints import InstalledEndpoints
from whet.rollout.complete import complete, merged_columns
from whet.rollout.gate import Gate
from whet.rollout.rewards import RecordedReward
from whet.rollout.routing import Route

if TYPE_CHECKING:
    from whet.interfaces.generator import Generator


Prompts = dict[tuple[Tools, Conversation], tuple[str, IntArray]]
"""(tools, opening messages) of a group -> the name under which requests share their computation, and the tokens."""


@frozen(eq=False)
class Assignment:
    """A task to be played by all samples of a group."""

    route: Route
    task: Task
    position: int
    """Position of the task in its split."""
    index: int
    """Index of the group: its place in the order of admission, or its task in an evaluation. Seeds derive from it."""
    step: int = 0
    """Number of finished steps when the group was admitted."""
    difficulty: float | None = None
    """Difficulty of all episodes of the group, if the environment has one; see `Adaptive`."""
    prompts: Prompts = field(factory=dict)
    """Prompts of the group, filled while playing."""
    tally: Counter[str] = field(factory=Counter)
    """Counts episodes by outcome, filled while playing: `done`, `retried`, finally `failed`, finally lost to
    `infrastructure`. Among the `done` ones, `undecided` counts responses that graders could not decide."""


@frozen(eq=False)
class Sequences:
    """What the sequences of one stream, or of one evaluation, have in common."""

    generator: "Generator"
    chat: Chat
    sampling: Sampling
    """Sampling of each turn, with the chat's stop tokens; see `whet.rollout.episode.with_stop_tokens`."""
    max_context: int
    """Longest sequence, prompt included, in tokens; 0: no limit."""
    seed: int
    """The run's seed."""
    purpose: str
    """Keeps the randomness of training and evaluation apart."""
    training: bool = field(default=True, kw_only=True)
    """Whether the episodes are trained on. Other episodes state their final answers, if their environment can."""
    gate: Gate = field(factory=Gate, kw_only=True)
    """The gate that requests pass on their way to the generator."""
    endpoints: Endpoints = field(factory=InstalledEndpoints, kw_only=True)
    """Opens the endpoints of episodes."""


class RecordedModel:
    """One conversation of an episode with the model. Obeys `Model` and `RecordedSequence` of `whet.interfaces`."""

    def __init__(
        self, shared: Sequences, assignment: Assignment, sample: int, attempt: int,
        beside: "RecordedModel | None" = None, tools: Tools = (), agent: str = "",
    ) -> None:  # fmt: skip
        """Begin a sequence without history, in the episode of the sequence `beside` if there is one."""
        self._tools, self._chat = tools, shared.chat.with_tools(tools) if tools else shared.chat
        self._shared, self._assignment, self._sample_attempt = shared, assignment, (sample, attempt)
        self.agent = agent
        self.sequences: list[RecordedModel] = [] if beside is None else beside.sequences
        """All sequences of the episode, in the order in which they were started."""
        self.recorded: list[RecordedReward] = [] if beside is None else beside.recorded
        """The rewards that the episode has recorded."""
        self.log: dict[str, Any] = {} if beside is None else beside.log
        """The values that `record` has added to the record of the episode, by name."""
        self.failures: list[Exception] = [] if beside is None else beside.failures
        """Failures of the model. With one the episode is not scored, even if its environment has caught the error."""
        self.over: threading.Event = threading.Event() if beside is None else beside.over
        """Set when the episode has ended: what comes later would be lost."""
        self._loop: asyncio.AbstractEventLoop = beside._loop if beside else asyncio.get_running_loop()
        self._fork = len(self.sequences)
        self.sequences.append(self)
        self.messages: Conversation = ()
        """The conversation so far, for the chat template and for records."""
        self._parts = [_Part()]
        self._offsets = [(0, 0, 0)]  # (part, tokens, messages) at the start and after each completion
        self._full = self._busy = False
        self._before = self._parts[-1].tokens  # tokens of the part before its last turn

    @property
    def episode(self) -> EpisodeInfo:
        """See `Model.episode`."""
        shared, assignment, (sample, attempt) = self._shared, self._assignment, self._sample_attempt
        of_group = derive_seed(shared.seed, f"environment {shared.purpose}", assignment.index)
        return EpisodeInfo(
            assignment.route.split, shared.training, assignment.position, assignment.index, sample,
            derive_seed(of_group, "sample", sample, attempt), of_group, assignment.step, assignment.difficulty,
        )  # fmt: skip

    def fork(self, agent: str = "", turns: int | None = None) -> "RecordedModel":
        """See `RecordedSequence.fork`.

        The model's tokens up to here count for the loss only in the sequence in which they were produced.
        """
        turns = self.turns if turns is None else turns
        other = self.fresh(self._tools)
        other.agent = agent or self.agent
        other._parts[0].tokens, other.messages = self.history(turns)
        other._offsets = [(0, *self._offsets[turns][1:])]
        other._full = self._full and turns == self.turns
        return other

    def fresh(self, tools: Tools = ()) -> "RecordedModel":
        """Start another sequence of the same episode, without history, and return it."""
        return RecordedModel(self._shared, self._assignment, *self._sample_attempt, self, tools, self.agent)

    def with_tools(self, tools: Tools) -> "RecordedModel":
        """See `Model.with_tools`."""
        return self.fresh(tools)

    def forget(self) -> None:
        """Remove the last response, and the messages with which it was asked for."""
        self._offsets.pop()
        self._parts[-1].completions.pop()
        if not self._parts[-1].completions and len(self._parts) > 1:
            self._parts.pop()
        else:
            self._parts[-1].tokens = self._before
        self.messages = self.messages[: self._offsets[-1][2]]

    def reward(
        self, name: str, value: float, *, of: Literal["turn", "sequence", "agent"] = "turn",
        tokens: tuple[int, int] | None = None, turns: int | None = None,
    ) -> None:  # fmt: skip
        """See `Model.reward`; `turns` is as in `fork`. Raises `EpisodeError` for a wrong address or value."""
        self._refuse_late("reward")
        ((name, number),) = checked_rewards({name: value}, self._assignment.route.name).items()
        if of == "agent" and tokens is None:
            self.recorded.append(RecordedReward(name, number, self.agent))
            return
        turns = self.turns if turns is None else turns
        if not turns:
            raise EpisodeError(f"it gave the reward {name!r} to a {of} of a sequence without a response")
        if of == "sequence" and tokens is None:
            self.recorded.append(RecordedReward(name, number, self.agent, self._fork))
            return
        part, end, _ = self._offsets[turns]
        begin, completion = next((b, c) for b, c, _ in self._parts[part].completions if b + len(c.tokens) == end)
        first, last = tokens or (0, len(completion.tokens))
        if of != "turn" or not 0 <= first < last <= len(completion.tokens):
            raise EpisodeError(
                f"it gave the reward {name!r} to the tokens {tokens} of a {of}; wanted a turn, and tokens from 0 to "
                f"{len(completion.tokens)}"
            )
        span = (begin + first, begin + last)
        self.recorded.append(RecordedReward(name, number, self.agent, self._fork, span, part))

    def record(self, name: str, value: Any) -> None:
        """See `Model.record`. Raises `EpisodeError` for a value that cannot be recorded."""
        self._refuse_late("record")
        try:
            self.log[str(name)] = recordable(value)
        except DataError as error:
            raise EpisodeError(f"it recorded {name!r}: {error}") from error

    def _refuse_late(self, method: str) -> None:
        if self.over.is_set():
            words = f"model.{method} after the episode's end has no effect; await its task before `run` returns"
            self._assignment.route.warn(words)
            raise EpisodeError(f"environment {self._assignment.route.name!r}: {words}")

    def endpoint(self, *, ignore: Collection[str] = ()) -> AbstractAsyncContextManager[Address]:
        """Open an OpenAI-compatible address at which an external agent plays the episode."""
        return self._shared.endpoints.open(self, self._shared.chat, self._shared.sampling, ignore)

    @property
    def turns(self) -> int:
        """Return the number of completions of this sequence. A sequence without completions has no trajectory."""
        return len(self._offsets) - 1

    def history(self, turns: int) -> tuple[IntArray, Conversation]:
        """Return the tokens and messages as they were after `turns` completions."""
        part, tokens, messages = self._offsets[turns]
        return self._parts[part].tokens[:tokens], self.messages[:messages]

    async def reply(
        self, messages: str | Message | Sequence[Message], *, max_tokens: int | None = None, stop: Sequence[str] = (),
        temperature: float | None = None, prefill: str = "",
    ) -> Reply:  # fmt: skip
        """See `Model.reply`. Raises `ContextFull`, or `EpisodeError` if a first prompt does not fit."""
        own, asked = self._shared.sampling, conversation(messages)
        if not (asked or self.messages):
            raise EpisodeError("it asked the model without a message; begin with one")
        sampling = evolve(
            own,
            max_tokens=own.max_tokens if max_tokens is None else min(max_tokens, own.max_tokens),
            temperature=own.temperature if temperature is None else temperature,
            stop=(*own.stop, *stops(stop)),
        )
        try:
            turn = await self.turn(asked, sampling, prefill=prefill)
        except ContextFull as error:
            if len(self._parts[-1].tokens):
                raise
            raise EpisodeError(
                f"its prompt of {error.length} tokens leaves no room for a response in {self._shared.max_context}; "
                "raise rollout.max_context or leave the task out"
            ) from error
        return Reply(turn.text, tuple(turn.completion.tokens.tolist()), turn.completion.stop, self.messages[-1].calls)

    async def turn(
        self, messages: Conversation, sampling: Sampling, tokens: IntArray | None = None, prefill: str = ""
    ) -> Turn:
        """Append messages, sample a response, and return the turn. Raises `ContextFull`.

        tokens [appended]: append these instead of the tokens that the chat template makes of the messages.
        """
        if self._busy:
            raise EpisodeError("it asked one sequence twice at the same time; use model.fork() for each")
        self._busy = True
        try:
            return await on_loop(self._turn(messages, sampling, tokens, prefill), self._loop)
        finally:
            self._busy = False

    async def _turn(self, messages: Conversation, sampling: Sampling, appended: IntArray | None, prefill: str) -> Turn:
        self._refuse_late("reply")
        shared, part = self._shared, self._parts[-1]
        if self._full:
            await asyncio.sleep(0)  # an environment in an endless loop must still meet its deadline
        prefix, tokens, anew = self._tokens_with(messages, appended)
        if prefill:
            prefix, tokens = "", np.concatenate([tokens, self._chat.encode(prefill)])
        room = shared.max_context - len(tokens) if shared.max_context else sampling.max_tokens
        if room < 1:
            self._full = len(part.tokens) > 0
            raise ContextFull(len(tokens), shared.max_context)
        position = (self._assignment.index, *self._sample_attempt, self._fork, self.turns)
        request = Request(
            id=f"{shared.purpose}-" + "-".join(map(str, position)), tokens=tokens,
            sampling=sampling if room >= sampling.max_tokens else evolve(sampling, max_tokens=room),
            seed=derive_seed(shared.seed, shared.purpose, *position), prefix=prefix,
        )  # fmt: skip
        try:
            async with shared.gate:
                completion = await complete(shared.generator, request, shared.chat.decode)
            self._refuse_late("reply")
            completion = checked_completion(completion, request)
        except Exception as error:
            if type(error) is not WhetError:  # such an error refuses this request alone
                self.failures.append(error)
            raise
        self._full = False
        said = self._chat.message(completion.tokens, prefill)
        if self._tools:
            said = evolve(said, calls=with_ids(self._chat.parts(said).calls, tokens, completion.tokens))
        if anew:
            part = _Part()
            self._parts.append(part)
        part.completions.append((len(tokens), completion, sampling.temperature == shared.sampling.temperature))
        self._before, part.tokens = part.tokens, np.concatenate([tokens, completion.tokens])
        self.messages = (*self.messages, *messages, said)
        self._offsets.append((len(self._parts) - 1, len(part.tokens), len(self.messages)))
        return Turn(tokens, completion, said.text)

    def _tokens_with(self, messages: Conversation, appended: IntArray | None) -> tuple[str, IntArray, bool]:
        """Return the name of a shared prompt or "", the tokens with the messages, and whether a new sequence begins."""
        tokens = self._parts[-1].tokens
        if appended is not None:
            return "", np.concatenate([tokens, appended]), False
        if len(tokens):
            ended = int(tokens[-1]) in self._chat.stop_tokens
            try:
                return "", np.concatenate([tokens, self._chat.continuation(self.messages, ended, messages)]), False
            except RewrittenHistory:
                # A fork that has no response of its own yet needs no other sequence: nothing of it is trained on.
                return "", self._chat.prompt((*self.messages, *messages)), bool(self._parts[-1].completions)
        prompts, key = self._assignment.prompts, (self._tools, messages)
        if key not in prompts:
            name = f"{self._shared.purpose}-{self._assignment.index}-{len(prompts)}"
            prompts[key] = (name, self._chat.prompt(messages))
        return (*prompts[key], False)

    def trajectories(self) -> tuple[Trajectory, ...]:
        """Return the recorded sequences of the conversation: one, and one more for each rewrite of history.

        A fork's history is part of its prompt: its parent's sequence trains those tokens.
        """
        return tuple(self._trajectory(i, part) for i, part in enumerate(self._parts) if part.completions)

    def _trajectory(self, number: int, part: "_Part") -> Trajectory:
        length = len(part.tokens)
        mask, logprobs = np.zeros(length, np.bool_), np.zeros(length, np.float32)
        versions = np.full(length, -1, np.int32)
        for begin, completion, trained in part.completions:
            end = begin + len(completion.tokens)
            mask[begin:end] = trained
            logprobs[begin:end] = completion.logprobs if trained else 0.0
            for first, version in completion.versions:
                versions[begin + first : end] = version
        prompt_length, stop = part.completions[0][0], part.completions[-1][1].stop
        full = self._full and number == len(self._parts) - 1
        return Trajectory(
            part.tokens, mask, logprobs, versions, prompt_length, "context" if full else stop,
            tuple((begin, begin + len(completion.tokens)) for begin, completion, _ in part.completions), self.agent,
            number, columns=merged_columns(((begin, completion) for begin, completion, _ in part.completions), length),
        )  # fmt: skip


def checked_completion(completion: Completion, request: Request) -> Completion:
    """Return the completion if it is valid for the request. Raises `PluginError` that names what is wrong with it."""
    count, limit = len(completion.tokens), request.sampling.max_tokens
    if not 0 < count <= limit:
        raise PluginError(f"the generator gave {count} tokens for request {request.id}, wanted 1 to {limit}")
    if completion.id != request.id or completion.stop not in get_args(Stop) or np.min(completion.tokens) < 0:
        found = f"stop {completion.stop!r}, and tokens from {np.min(completion.tokens)} on"
        raise PluginError(f"the generator gave, for request {request.id}, the completion {completion.id} with {found}")
    if len(completion.logprobs) != count or not np.isfinite(completion.logprobs).all():
        raise PluginError(
            f"the generator gave {len(completion.logprobs)} logprobs for the {count} tokens of request {request.id}, "
            f"wanted a finite one for each; the lowest is {np.min(completion.logprobs, initial=0.0)}"
        )
    wanted = len(request.tokens) + count
    if odd := [name for name, column in completion.columns.items() if len(column) != wanted]:
        raise PluginError(f"the generator gave {odd[0]} of request {request.id} not for its {wanted} tokens in all")
    if not completion.versions or completion.versions[0][0] != 0:
        raise PluginError(f"the generator gave no weight version for the first token of request {request.id}")
    return completion


@define(eq=False)
class _Part:
    """A sequence of a conversation."""

    tokens: IntArray = field(factory=lambda: np.zeros(0, np.int64))
    completions: list[tuple[int, Completion, bool]] = field(factory=list)
    """Position of its first token, completion, whether it is trained on."""
