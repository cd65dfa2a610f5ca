"""The contract of an environment, and a short way to write an environment with one response per episode.

    def build(config):
        return SingleTurn({"train": tasks}, rewards={"correct": grade, "format": (has_box, 0.1)})

A reward of a `SingleTurn` is a function of the response's text and the task's data. It may have a weight.

A reward has an address. `run` returns the rewards of the whole episode. `model.reward` records all others:

    returned by run                            every sequence of the episode
    white.reward("won", 1.0, of="agent")       every sequence of one agent, e.g. one player of a game
    branch.reward("solved", 1.0, of="sequence")    one sequence
    model.reward("legal", -0.1)                the model's last turn in this sequence
    model.reward("fact", 0.5, tokens=(3, 9))   tokens 3 to 8 of this turn

The reward of a sequence is the weighted sum of all rewards that its address includes. Advantage estimators compare the
sequences of one agent within a group. Estimators per turn also use the place of a reward.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from numbers import Real
from typing import Any, Final, Literal, Protocol, cast, runtime_checkable

from attrs import field, frozen

from whet.data.messages import Conversation, Message, Tools
from whet.data.records import Episode, Group, Reply, Task
from whet.errors import DataError, EpisodeError, PluginError, Undecided


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


@frozen
class EpisodeInfo:
    """Facts about an episode that its environment may need."""

    split: str
    """The split of the task."""
    training: bool
    """Whether the episode is trained on. If not, it belongs to an evaluation."""
    task: int
    """Position of the task in its split."""
    group: int
    """Number of the group. In training: the order of admission over the whole run. In evaluation: equal to `task`."""
    sample: int
    """Number of the episode among the samples of its group, counted from 0."""
    seed: int
    """For the environment's randomness. It differs for each sample, and for each new attempt at a failed episode."""
    group_seed: int
    """For the environment's randomness. It is the same for all samples of a group."""
    step: int = 0
    """In training: the number of finished steps when the group was admitted. In evaluation: 0."""
    difficulty: float | None = None
    """In training: the environment's `difficulty()` when the group was admitted; see `Adaptive`. Else None."""


@runtime_checkable
class Model(Protocol):
    """The model as an episode sees it. It records tokens, logprobs, versions and the loss mask."""

    @property
    def episode(self) -> EpisodeInfo:
        """Return facts about the episode: its split, seeds, and number among the samples of its group."""

    async def reply(
        self, messages: "str | Message | Sequence[Message]", *, max_tokens: int | None = None, stop: Sequence[str] = (),
        temperature: float | None = None, prefill: str = "",
    ) -> Reply:  # fmt: skip
        """Append messages to the history, sample a response, and return it.

        The model's own tokens are kept, and never tokenised again. If the chat template rewrites history, the
        conversation goes on in another sequence of the same episode. Raises `ContextFull` if the context leaves no room
        for a response.

        :param max_tokens: a limit below the run's limit. None: the run's limit.
        :param stop: stop strings in addition to the run's.
        :param temperature: if it differs from the run's, the response is context, and it is not trained on: its tokens
            come from another distribution than the policy's. None: the run's temperature.
        :param prefill: the beginning of the response. The model continues it. Its tokens are not trained on.
        """

    def with_tools(self, tools: Tools) -> "Model":
        """Return another sequence of the same episode, without history. Its prompt describes the tools.

        The chat template writes the tools, and `Reply.calls` has the calls that the model wrote in the template's own
        format. A template that knows no tools leaves them out. A result is `Message("tool", text, answers=call.id)`.
        """

    def fork(self, agent: str = "") -> "Model":
        """Return another sequence of the same episode. It starts with the history so far.

        `agent` names the agent that the sequence belongs to, e.g. a player of a game. Empty: the same agent.
        """

    def reward(
        self, name: str, value: float, *, of: Literal["turn", "sequence", "agent"] = "turn",
        tokens: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Record a reward of the last turn of this sequence, of this sequence, or of its agent.

        `tokens` narrows a reward of a turn to some tokens of the response: the first, and the one after the last.
        Values of one name and address are added. A name that an episode does not record counts as 0. A reward of an
        agent that has written no response counts nowhere.
        """

    def record(self, name: str, value: Any) -> None:
        """Add a value to the record of the episode, for the run folder and the report.

        `value`: text, a number, an `Image`, or a list or array of at most 4,096 of them. A long text is cut.
        """

    def endpoint(self, *, ignore: Collection[str] = ()) -> AbstractAsyncContextManager[Address]:
        """Open an OpenAI-compatible endpoint for an external agent: `async with model.endpoint() as address:`.

        The agent's requests are recorded in the same way as calls of `reply`. If the messages of a request continue a
        conversation of this endpoint, or this sequence, the response continues the recorded tokens. Any other messages
        start another sequence of the episode. A request is refused if its sampling parameters differ from the run's
        parameters; the parameters in `ignore` are not compared. If the model fails, the body is cancelled and the error
        is raised. Needs `pip install 'whet[endpoint]'`.
        """


@runtime_checkable
class Environment(Protocol):
    """Tasks, and episodes that end in named rewards. The component's target is called as `target(config)`."""

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split. If the split does not exist, raise `DataError` with the names of the splits.

        If tasks are generated, item i is computed from a seed and i. So a position in the data is an integer.
        """

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play one episode with the model, and return its named rewards.

        The mapping has the rewards of the whole episode. It may be empty if the episode recorded rewards by
        `model.reward`.

        A response for which a grader raises `Undecided` counts as wrong. The environment may catch the exception. If
        the environment does not catch it, every reward is 0. If it does not catch `ContextFull`, the episode ends with
        the recorded rewards.
        """

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Return the weight of each named reward in the total reward. A name without an entry has weight 1."""

    def close(self) -> None:
        """Release the resources of the environment, e.g. grader processes. A second call does nothing."""


@runtime_checkable
class Answering(Protocol):
    """An optional extension of `Environment`. The majority votes of an evaluation (`maj@k`) need it."""

    def final_answer(self, messages: Conversation) -> str | None:
        """Return the final answer of an episode as text. Return None if the episode has no answer, and thus no vote.

        Equal answers must be equal text. `messages` is the conversation of the episode's first sequence. It ends with
        the model's last response, which may be hostile and of any length. The method must not read the reference
        answer. It runs on the thread of all episodes, so it must be fast.
        """


@runtime_checkable
class GroupRewarding(Protocol):
    """An optional extension of `Environment`: rewards that compare the episodes of a group, e.g. ranks or diversity."""

    async def group_rewards(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        """Return further named rewards of each episode of a group.

        The method is called once, when all episodes of the group have finished. `episodes` have their own rewards
        already. In evaluation, the group is the samples of a task that succeeded. If the method raises, the group is
        dropped, or its tasks are in evaluation. One deadline holds for the method, as for an episode.
        """


@runtime_checkable
class Adaptive(Protocol):
    """An optional extension of `Environment`: a curriculum that follows the results of training.

    All samples of a group are played at the difficulty at which the group was admitted. An environment that keeps
    numbers from group to group also has `state` and `load`; see `whet.interfaces.state`.
    """

    def difficulty(self) -> float:
        """Return the difficulty for the next group. `model.episode.difficulty` is this number."""

    def adapted(self, task: Task, difficulty: float) -> Task:
        """Return a task at a difficulty. If `run` alone follows the difficulty, return the task unchanged."""

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn from the groups that a step consumed, in order of admission, those that a filter removed included."""


class Scorer(Protocol):
    """A role that computes values, as an environment sees it: `roles[NAME]`, if the role's section has a backend."""

    async def value(self, messages: "str | Message | Sequence[Message]", cut: bool = False) -> float:
        """Return the value of a conversation that ends with the assistant's turn: the output of the model's head there.

        A conversation that is longer than the model's positions is cut to its end if `cut` is true. Raises `DataError`
        if it is false, or if that model's chat template cannot render the conversation.
        """


class Responder(Protocol):
    """A role that writes responses, as an environment sees it: `roles[NAME]`, if the role's section has a generator.

    Examples: a judge that explains its verdict, a simulated user, an opponent. Nothing that it writes is trained on.
    """

    async def reply(
        self, messages: "str | Message | Sequence[Message]", *, seed: int, max_tokens: int | None = None,
        stop: Sequence[str] = (), temperature: float | None = None, prefill: str = "",
    ) -> Reply:  # fmt: skip
        """Return a response to a whole conversation. The model of the role is the conversation's assistant.

        Nothing is kept from call to call. Raises `DataError` if the conversation leaves no room for a response in the
        model's positions, or if the model's chat template cannot render it.

        :param seed: for the randomness of the response: equal seeds and conversations have equal responses. Usually
            `model.episode.seed`; `derive_seed(seed, "vote", i)` of `whet.data.randomness` for several responses.
        :param max_tokens: the longest response, in tokens. None: `rollout.max_tokens`.
        :param stop: stop strings.
        :param temperature: None: 1. 0: the likeliest tokens.
        :param prefill: the beginning of the response. The model continues it.
        """


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
        self, tasks: Mapping[str, Sequence[Task]],
        rewards: Mapping[str, "RewardFunction | tuple[RewardFunction, float]"], answer: "AnswerFunction | None" = None,
    ) -> None:  # fmt: skip
        self._tasks, self._rewards, self._weights = tasks, dict[str, RewardFunction](), dict[str, float]()
        if answer is not None:
            self.final_answer = lambda messages: answer(messages[-1].text)
        for name, given in dict(rewards).items():
            function: Any  # a wrong one has another type
            function, weight = given if isinstance(given, tuple) and len(given) == 2 else (given, 1.0)
            if not callable(function):
                wanted = "wanted a function, or a tuple (function, weight)"
                raise PluginError(f"the reward {name!r} of a SingleTurn is {given!r:.120}; {wanted}")
            self._rewards[name], self._weights[name] = function, weight

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
        """Sample one response, and return what each reward function gives for it: 0 if it raises `Undecided`."""
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


_RESERVED: Final = frozenset({"mean", "std", "greedy", "response_length", "dropped", "undecided"})
"""Names of metrics beside those of rewards."""


LARGEST_REWARD: Final = 1e18
"""Squares of rewards must fit into 32 bits."""


def checked_rewards(rewards: object, environment: str) -> dict[str, float]:
    """Return the rewards from `run` as a dict. Raise `EpisodeError` unless they map names to finite numbers."""
    if not isinstance(rewards, Mapping):
        found = f"environment {environment!r} returned {rewards!r:.120}"
        raise EpisodeError(f"{found}, wanted a mapping of reward names to numbers")
    checked = {}
    for name, value in rewards.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise EpisodeError(
                f"environment {environment!r} gave a reward the name {name!r:.60}, wanted printable text"
            )
        if name in _RESERVED or name.startswith(("pass@", "maj@")):
            words = "metrics of other things have this name; rename it"
            raise EpisodeError(f"environment {environment!r} gave the reward {name!r}; {words}")
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= LARGEST_REWARD:
            words = "wanted a finite number" + f" of at most {LARGEST_REWARD:g}" * math.isfinite(number)
            raise EpisodeError(f"environment {environment!r} gave the reward {name!r} = {value!r:.60}, {words}")
        checked[str.__str__(name)] = number  # of an enum, say
    return checked


def check_weights(weights: object) -> None:
    """Raise `PluginError` unless the `reward_weights` of an environment map reward names to finite numbers."""
    fine = isinstance(weights, Mapping) and all(
        isinstance(name, str) and isinstance(value, Real) and math.isfinite(value) for name, value in weights.items()
    )
    if not fine:
        wanted = "wanted an attribute or a property that maps reward names to finite numbers"
        raise PluginError(f"its `reward_weights` is {weights!r:.120}; {wanted}")
