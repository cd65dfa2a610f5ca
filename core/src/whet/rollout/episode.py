"""One episode: an environment drives the model, and every token of it is recorded.

    prompt      the model's answer   what the environment said   the model's answer
    t t t t t   t t t                t t t t                     t t              tokens
    . . . . .   x x x                . . . .                     x x              loss_mask

History is append-only: the model's tokens are kept as they were sampled, never decoded and tokenised again, and
what an environment says is tokenised once, when it says it.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import numpy as np
from attrs import evolve, field, frozen

from whet.data.messages import Conversation, Message, conversation
from whet.data.records import (
    Completion,
    Episode,
    Group,
    IntArray,
    Reply,
    Request,
    Sampling,
    Task,
    Trajectory,
)
from whet.errors import EnvironmentError as WhetEnvironmentError
from whet.errors import InfrastructureError, PluginError, WhetError, WorkerError, in_words
from whet.interfaces.environment import checked_rewards, stated_answer
from whet.randomness import derive_seed
from whet.rollout.complete import complete
from whet.rollout.gate import Gate
from whet.rollout.loop import gather_or_cancel
from whet.rollout.routing import Route
from whet.rollout.trial import BrokenEnvironment, Trial, is_infrastructure

if TYPE_CHECKING:
    from whet.interfaces.generator import Generator


class Chat(Protocol):
    """What an episode needs of a `whet.data.chat.ChatTokenizer`, which says what each does."""

    @property
    def stop_tokens(self) -> tuple[int, ...]: ...  # noqa: D102 - as there

    def prompt(self, conversation: Conversation) -> IntArray: ...  # noqa: D102

    def continuation(self, history: Conversation, stopped: bool, messages: Conversation) -> IntArray: ...  # noqa: D102

    def decode(self, tokens: IntArray) -> str: ...  # noqa: D102


Prompts = dict[Conversation, tuple[str, IntArray]]
"""Opening messages of a group -> the name under which requests share their computation, and the tokens."""


class EpisodeFailed(WhetError):  # noqa: N818 - the field's word is "failed episode"
    """An episode failed on every attempt. Names environment, task and sample; its cause is the last error."""

    def __init__(self, message: str, infrastructure: bool = False) -> None:
        super().__init__(message)
        self.infrastructure = infrastructure
        """Whether what it stands on failed, rather than the episode."""


PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 30.0
"""Before an episode is played again whose infrastructure failed: four times as long each time."""


@frozen(eq=False)
class Assignment:
    """A task to be played by all samples of a group."""

    route: Route
    task: Task
    position: int
    """Of the task in its split."""
    index: int
    """Of the group: order of admission in training, position of the task in evaluation. Randomness comes from this."""
    prompts: Prompts = field(factory=dict)
    """Filled while playing."""
    tally: Counter[str] = field(factory=Counter)
    """Counts episodes `done`, `retried`, and `failed` or lost to `infrastructure` for good, while playing."""


@frozen(eq=False)
class Player:
    """Plays episodes: what those of one stream, or of one evaluation, have in common."""

    generator: "Generator"
    chat: Chat
    sampling: Sampling
    """Of each turn, with the chat's stop tokens; see `with_stop_tokens`."""
    max_context: int
    """Longest sequence, prompt included, in tokens; 0: no limit."""
    seed: int
    """The run's."""
    purpose: str
    """Keeps the randomness of training and evaluation apart."""
    retries: int
    deadline_seconds: float
    """For one attempt at an episode, all its turns included."""
    infrastructure_retries: int = 0
    gate: Gate = field(factory=Gate)
    """What requests pass on their way to the generator."""
    answers: bool = False
    """Whether to ask the environment what each episode answered, where it can say."""
    trials: dict[str, Trial] = field(factory=dict)
    """Of each environment; filled while playing."""

    async def group(self, assignment: Assignment, samples: int) -> Group:
        """Play all episodes of a group at once. The first that fails for good ends the others."""
        episodes = await gather_or_cancel(self.episode(assignment, sample) for sample in range(samples))
        return Group(assignment.index, assignment.route.name, assignment.position, tuple(episodes))

    async def episode(self, assignment: Assignment, sample: int) -> Episode:
        """Play an episode, and again with fresh randomness when it fails. Raises `EpisodeFailed` in the end.

        When its infrastructure fails it is played again just as it was: what broke down in passing leaves no trace.
        Where that does not help the answer itself may be the cause, as of a grader that it hangs, and randomness is
        fresh from then on. A request that may be what kills replicas is not made again. `WorkerError` and
        `BrokenEnvironment` come through at once.
        """
        trial = self._trial(assignment.route.name)
        attempt, failures = 0, Counter[str]()
        cause: BaseException
        while True:
            try:
                with trial.first_attempt(assignment.index) if not failures else nullcontext():
                    episode = await self._attempt(assignment, sample, attempt)
            except (WorkerError, BrokenEnvironment):
                raise
            except asyncio.CancelledError as error:
                if (current := asyncio.current_task()) and current.cancelling():
                    raise
                cause = error
            # SystemExit, as of a grader that calls exit(), would end the event loop.
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                cause = error
            else:
                assignment.tally["done"] += 1
                return episode
            kind = "infrastructure" if is_infrastructure(cause) else "failed"
            failures[kind] += 1
            allowed = self.infrastructure_retries if kind == "infrastructure" else self.retries
            if failures[kind] > allowed or not getattr(cause, "again", True):
                assignment.tally[kind] += 1
                raise self._failure(assignment, sample, failures.total(), cause) from cause
            assignment.tally["retried"] += 1
            attempt += kind == "failed" or failures[kind] > 1
            await trial.before_another()
            if kind == "infrastructure":
                await asyncio.sleep(min(PAUSE_SECONDS * 4 ** (failures[kind] - 1), LONGEST_PAUSE_SECONDS))

    def _trial(self, environment: str) -> Trial:
        return self.trials.setdefault(environment, Trial(environment))

    def _failure(self, assignment: Assignment, sample: int, failures: int, cause: BaseException) -> EpisodeFailed:
        times = f"{failures} times" if failures > 1 else "once"
        return EpisodeFailed(
            f"environment {assignment.route.name!r}, task {assignment.position}, sample {sample} failed {times}; "
            f"last: {in_words(cause)}",
            is_infrastructure(cause),
        )

    async def _attempt(self, assignment: Assignment, sample: int, attempt: int) -> Episode:
        route = assignment.route
        model = RecordedModel(self, assignment, (sample, attempt))
        try:
            async with self.gate.time_limit(self.deadline_seconds) as deadline:
                given = await route.environment.run(assignment.task, model)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise InfrastructureError(
                f"it was not over after {self.deadline_seconds:g} seconds (cluster.deadlines.episode)"
            ) from None
        rewards = checked_rewards(given, route.name)
        sequences = [sequence for sequence in model.family if sequence.turns]
        if not sequences:
            raise WhetEnvironmentError("it ended without asking the model anything")
        return Episode(
            environment=route.name,
            task=assignment.position,
            sample=sample,
            trajectories=tuple(sequence.trajectory() for sequence in sequences),
            rewards=rewards,
            reward=total_reward(rewards, route.environment.reward_weights),
            turns=sum(sequence.turns for sequence in sequences),
            messages=tuple((message.role, message.text) for message in sequences[0].messages),
            task_id=assignment.task.id,
            answer=stated_answer(route.environment, sequences[0].messages) if self.answers else None,
        )


def with_stop_tokens(sampling: Sampling, chat: Chat) -> Sampling:
    """Let a turn end at the tokens that end it in the chat template."""
    return evolve(sampling, stop_tokens=(*chat.stop_tokens, *sampling.stop_tokens))


def total_reward(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Weigh the named rewards and sum them; a name without a weight counts 1."""
    return float(sum(weights.get(name, 1.0) * value for name, value in rewards.items()))


class RecordedModel:
    """The model as an episode sees it: one sequence that grows. Obeys `whet.interfaces.environment.Model`."""

    def __init__(
        self, player: Player, assignment: Assignment, seat: tuple[int, int], parent: "RecordedModel | None" = None
    ) -> None:
        """Begin a sequence; `seat` is (sample, attempt)."""
        self._player, self._assignment, self._seat = player, assignment, seat
        self.family: list[RecordedModel] = parent.family if parent else []
        """All sequences of the episode, in the order they were started."""
        self._fork = len(self.family)
        self.family.append(self)
        self.messages: Conversation = parent.messages if parent else ()
        """The conversation so far, for the chat template and for readers."""
        self._tokens: IntArray = parent._tokens if parent else _NO_TOKENS
        self._completions: list[tuple[int, Completion]] = []  # with the position of its first token
        self._full: bool = parent._full if parent else False
        self._busy = False

    def fork(self) -> "RecordedModel":
        """Start another sequence of the same episode with the history so far.

        The model's tokens up to here count for the loss in the sequence that they were produced in, and there only.
        """
        return RecordedModel(self._player, self._assignment, self._seat, self)

    @property
    def turns(self) -> int:
        """Completions of this sequence. One that the model never added to leaves no trajectory."""
        return len(self._completions)

    async def reply(self, messages: str | Message | Sequence[Message]) -> Reply:
        """Append messages to the history and let the model answer.

        Where the context leaves no room for an answer, the messages are not appended and the reply has no text
        and the stop `length`, now and from then on. A first prompt that leaves no room is an error.
        """
        if self._busy:
            raise WhetEnvironmentError("it asked one sequence twice at the same time; use model.fork() for each")
        self._busy = True
        try:
            return await self._reply(conversation(messages))
        finally:
            self._busy = False

    async def _reply(self, messages: Conversation) -> Reply:
        player, sampling = self._player, self._player.sampling
        prefix, tokens = ("", self._tokens) if self._full else self._tokens_with(messages)
        room = player.max_context - len(tokens) if player.max_context else sampling.max_tokens
        if self._full or room < 1:
            return await self._out_of_room(len(tokens))
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
        return Reply(text, tuple(completion.tokens.tolist()), completion.stop)

    def _tokens_with(self, messages: Conversation) -> tuple[str, IntArray]:
        """Give the tokens to continue once messages are appended, and the name of a prompt that samples share."""
        if len(self._tokens):
            chat, ended = self._player.chat, int(self._tokens[-1]) in self._player.chat.stop_tokens
            return "", np.concatenate([self._tokens, chat.continuation(self.messages, ended, messages)])
        prompts = self._assignment.prompts
        if messages not in prompts:
            name = f"{self._player.purpose}-{self._assignment.index}-{len(prompts)}"
            prompts[messages] = (name, self._player.chat.prompt(messages))
        return prompts[messages]

    async def _out_of_room(self, length: int) -> Reply:
        if not len(self._tokens):
            raise WhetEnvironmentError(
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
