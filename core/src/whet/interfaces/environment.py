"""The contract of an environment, and the short way to write the common one.

    def build(config):
        return SingleTurn({"train": tasks}, rewards={"correct": grade, "format": (has_box, 0.1)})

A reward of such an environment is a function of the answer's text and the task's data; one may carry a weight.
"""

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, cast, runtime_checkable

from attrs import field, frozen

from whet.data.messages import Conversation, Message
from whet.data.records import Reply, Task
from whet.errors import EpisodeError, Undecided


@frozen(eq=False)
class Address:
    """Where a foreign agent finds the model of an episode, in the terms of OpenAI's clients."""

    base_url: str
    """E.g. `http://127.0.0.1:41234/v1`."""
    api_key: str = field(repr=False)
    """Stands for the episode, and for nothing once the endpoint is closed."""
    model: str
    """What requests call the model."""
    conversations: Callable[[], tuple[Conversation, ...]] = field(repr=False)
    """Gives the conversations so far, those of the first sequence first, each ending in the model's words."""


@runtime_checkable
class Model(Protocol):
    """The model as an episode sees it. It records tokens, logprobs, versions and the loss mask."""

    async def reply(self, messages: "str | Message | Sequence[Message]") -> Reply:
        """Append messages to the history and let the model answer.

        History is append-only: what the model produced is never tokenised again.
        """
        ...

    def fork(self) -> "Model":
        """Start another sequence of the same episode with the history so far."""
        ...

    def endpoint(self, *, ignore: Collection[str] = ()) -> AbstractAsyncContextManager[Address]:
        """Give a foreign agent an OpenAI-compatible address: `async with model.endpoint() as address:`.

        What it asks is recorded as by `reply`. Messages that go on with a conversation that the model had there, or
        with this sequence, continue its recorded tokens; all others begin another sequence of the episode. Requests
        that would sample otherwise than the run does are refused, but for the parameters to `ignore`. Where the model
        fails, the body is cancelled and the error raised. Needs `pip install 'whet[endpoint]'`.
        """
        ...


@runtime_checkable
class Environment(Protocol):
    """Tasks, and episodes that end in named rewards. The component's target is called as `target(config)`."""

    def tasks(self, split: str) -> Sequence[Task]:
        """Give the tasks of a split. A generated sequence computes item i from its seed, so that a position is an
        integer; a split that does not exist raises `DataError` naming those that do.
        """
        ...

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play one episode, driving the model, and give its named rewards.

        Where a grader raises `Undecided`, the answer is wrong: catch it, or let it through, and every reward is 0.
        """
        ...

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight of each named reward in the total; a name that is missing counts 1."""
        ...

    def close(self) -> None:
        """Release what the environment holds, e.g. grader processes. Safe to call twice."""
        ...


@runtime_checkable
class Answering(Protocol):
    """What an environment may also have: majority votes of an evaluation (`maj@k`) need it."""

    def final_answer(self, messages: Conversation) -> str | None:
        """Say what an episode answered, so that equal answers are equal text; None: it gave none, and has no vote.

        `messages` is its first sequence, which ends with the model's last words: hostile, and of any length. Never
        look at the right answer here. Called on the thread of all episodes: be quick.
        """
        ...


RewardFunction = Callable[[str, Mapping[str, Any]], "float | Awaitable[float]"]
"""(text of the answer, task.data) -> reward; may be async."""
AnswerFunction = Callable[[str], str | None]
"""text of the model's last words -> what it answered, so that equal answers are equal text; None: nothing."""


class SingleTurn:
    """An environment of one question and one answer.

    `answer`, e.g. `last_boxed` or `str.strip`, lets evaluations take majority votes; see `Answering`.
    """

    final_answer: Callable[[Conversation], str | None] | None = None

    def __init__(
        self,
        tasks: Mapping[str, Sequence[Task]],
        rewards: Mapping[str, "RewardFunction | tuple[RewardFunction, float]"],
        answer: "AnswerFunction | None" = None,
    ) -> None:
        self._tasks = tasks
        if answer is not None:
            self.final_answer = lambda messages: answer(messages[-1].text)
        pairs = {name: given if isinstance(given, tuple) else (given, 1.0) for name, given in rewards.items()}
        self._rewards = {name: function for name, (function, _) in pairs.items()}
        self._weights = {name: weight for name, (_, weight) in pairs.items()}

    def tasks(self, split: str) -> Sequence[Task]:
        """Give the tasks of a split."""
        from whet.errors import DataError

        if split not in self._tasks:
            raise DataError(f"there is no split {split!r}; there are {', '.join(self._tasks)}")
        return self._tasks[split]

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight of each named reward."""
        return self._weights

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Ask, and grade the answer by each reward function; one that a grader cannot decide about is 0."""
        answer = await model.reply(task.prompt)
        rewards: dict[str, float] = {}
        for name, function in self._rewards.items():
            try:
                value = function(answer.text, task.data)
                rewards[name] = await value if inspect.isawaitable(value) else value
            except Undecided:
                rewards[name] = 0.0
        return rewards

    def close(self) -> None:
        """Nothing is held."""


def states_answers(environment: Environment) -> bool:
    """Whether an environment can say what an episode answered; see `Answering`."""
    return callable(getattr(environment, "final_answer", None))


def stated_answer(environment: Environment, messages: Conversation) -> str | None:
    """Ask an environment what an episode answered; None where it gave no answer, or the environment does not say."""
    if not states_answers(environment):
        return None
    answer = cast(Answering, environment).final_answer(messages)
    if answer is not None and not isinstance(answer, str):
        raise EpisodeError(f"final_answer() gave {answer!r:.120}, wanted text, or None where there is no answer")
    return answer or None


def checked_rewards(rewards: object, environment: str) -> dict[str, float]:
    """Check what `run` returned: a mapping of names to finite numbers."""
    import math

    if not isinstance(rewards, Mapping) or not rewards:
        raise EpisodeError(
            f"environment {environment!r} returned {rewards!r:.120}, wanted a mapping of reward names to numbers"
        )
    checked = {}
    for name, value in rewards.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise EpisodeError(
                f"environment {environment!r} gave the reward {name!r} = {value!r:.60}, wanted a finite number"
            )
        checked[str(name)] = number
    return checked
