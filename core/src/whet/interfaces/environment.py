"""The contract of an environment, and a short way to write an environment with one response per episode.

    def build(config):
        return SingleTurn({"train": tasks}, rewards={"correct": grade, "format": (has_box, 0.1)})

A reward of a `SingleTurn` is a function of the response's text and the task's data. It may have a weight.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, cast, runtime_checkable

from attrs import field, frozen

from whet.data.messages import Conversation, Message
from whet.data.records import Reply, Task
from whet.errors import DataError, EpisodeError, Undecided


@frozen(eq=False)
class Address:
    """The address of an episode's model for an external agent, with the names of OpenAI's clients."""

    base_url: str
    """The URL of the endpoint, e.g. `http://127.0.0.1:41234/v1`."""
    api_key: str = field(repr=False)
    """Identifies the episode. It is not valid after the endpoint is closed."""
    model: str
    """The model name that requests use."""
    conversations: Callable[[], tuple[Conversation, ...]] = field(repr=False)
    """Returns the conversations so far, beginning with the conversation of the first sequence. Each conversation ends
    with the model's last response."""


@runtime_checkable
class Model(Protocol):
    """The model as an episode sees it. It records tokens, logprobs, versions and the loss mask."""

    async def reply(self, messages: "str | Message | Sequence[Message]") -> Reply:
        """Append messages to the history, sample a response, and return it.

        The history is append-only: the model's own tokens are kept, and never tokenised again.
        """
        ...

    def fork(self) -> "Model":
        """Return another sequence of the same episode. It starts with the history so far."""
        ...

    def endpoint(self, *, ignore: Collection[str] = ()) -> AbstractAsyncContextManager[Address]:
        """Open an OpenAI-compatible endpoint for an external agent: `async with model.endpoint() as address:`.

        The agent's requests are recorded in the same way as calls of `reply`. If the messages of a request continue a
        conversation of this endpoint, or this sequence, the response continues the recorded tokens. Any other messages
        start another sequence of the episode. A request is refused if its sampling parameters differ from the run's
        parameters; the parameters in `ignore` are not compared. If the model fails, the body is cancelled and the error
        is raised. Needs `pip install 'whet[endpoint]'`.
        """
        ...


@runtime_checkable
class Environment(Protocol):
    """Tasks, and episodes that end in named rewards. The component's target is called as `target(config)`."""

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split. If the split does not exist, raise `DataError` with the names of the splits.

        If tasks are generated, item i is computed from a seed and i. So a position in the data is an integer.
        """
        ...

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play one episode with the model, and return its named rewards.

        A response for which a grader raises `Undecided` counts as wrong. The environment may catch the exception. If
        the environment does not catch it, every reward is 0.
        """
        ...

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Return the weight of each named reward in the total reward. A name without an entry has weight 1."""
        ...

    def close(self) -> None:
        """Release the resources of the environment, e.g. grader processes. A second call does nothing."""
        ...


@runtime_checkable
class Answering(Protocol):
    """An optional extension of `Environment`. The majority votes of an evaluation (`maj@k`) need it."""

    def final_answer(self, messages: Conversation) -> str | None:
        """Return the final answer of an episode as text. Return None if the episode has no answer, and thus no vote.

        Equal answers must be equal text. `messages` is the conversation of the episode's first sequence. It ends with
        the model's last response, which may be hostile and of any length. The method must not read the reference
        answer. It runs on the thread of all episodes, so it must be fast.
        """
        ...


RewardFunction = Callable[[str, Mapping[str, Any]], "float | Awaitable[float]"]
"""(text of the response, task.data) -> reward. The function may be async."""
AnswerFunction = Callable[[str], str | None]
"""(text of the model's last response) -> final answer, or None if there is none. Equal answers must be equal text."""


class SingleTurn:
    """An environment with one prompt and one response per episode.

    The function `answer` extracts the final answer for majority votes, e.g. `last_boxed` or `str.strip`; see
    `Answering`.
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
        """Return the tasks of a split."""
        if split not in self._tasks:
            raise DataError(f"there is no split {split!r}; there are {', '.join(self._tasks)}")
        return self._tasks[split]

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Return the weight of each named reward."""
        return self._weights

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Sample one response, grade it with each reward function, and return the rewards.

        If a reward function raises `Undecided`, its reward is 0.
        """
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
        """Do nothing: a single-turn environment holds no resources."""


def states_answers(environment: Environment) -> bool:
    """Return whether an environment can extract the final answer of an episode; see `Answering`."""
    return callable(getattr(environment, "final_answer", None))


def stated_answer(environment: Environment, messages: Conversation) -> str | None:
    """Return the final answer of an episode. None: the episode has none, or the environment cannot extract one."""
    if not states_answers(environment):
        return None
    answer = cast(Answering, environment).final_answer(messages)
    if answer is not None and not isinstance(answer, str):
        raise EpisodeError(f"final_answer() gave {answer!r:.120}, wanted text, or None where there is no answer")
    return answer or None


def checked_rewards(rewards: object, environment: str) -> dict[str, float]:
    """Return the rewards from `run` as a dict. Raise `EpisodeError` unless they map names to finite numbers."""
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
