"""The records that environments, generators and algorithms exchange. Arrays are NumPy."""

import json
import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from numbers import Integral
from typing import Any, Literal

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from whet.data.messages import Call, Conversation, Image, conversation
from whet.errors import DataError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

Stop = Literal["stop", "length", "abort"]
"""Why a completion ended: a stop token or string, its length limit, or an abort."""


@frozen
class Task:
    """One item of an environment. `Task("What is 2+2?", {"answer": "4"})`."""

    prompt: Conversation = field(converter=conversation)
    """The opening messages."""
    data: Mapping[str, Any] = field(factory=dict)
    """Data for grading; builtins only. The model never sees it."""
    id: str = ""
    """A name for records and reports. Empty: the position in the split."""


GOLD = "answer"
"""Key of `Task.data` under which environments keep the reference answer."""
GOLD_CHARACTERS = 2_000
"""A longer reference answer is truncated in records: the data of a task may hold whole test suites."""


def gold_answer(task: Task) -> str | None:
    """Return the reference answer of a task as text: `answer` in its data, or all its data. None: it has no data."""
    if not task.data:
        return None
    held = task.data.get(GOLD, task.data)
    return shortened(held if isinstance(held, str) else json.dumps(held, ensure_ascii=False, default=repr))


def shortened(text: str, most: int = GOLD_CHARACTERS) -> str:
    """Return text, cut to a number of characters."""
    return text if len(text) <= most else f"{text[:most]} [{len(text) - most} more characters]"


RECORDED_CHARACTERS, RECORDED_NUMBERS = 20_000, 4_096
"""Limits of a value that an environment records."""


def recordable(value: Any) -> Any:
    """Return a value for the record of an episode as builtins. A long text is cut.

    Raises `DataError` for anything but text, numbers, an image, and arrays or lists of at most 4,096 numbers or texts.
    """
    if isinstance(value, Image):
        return {"type": "image", "url": value.url}
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    if isinstance(value, str):
        return shortened(value, RECORDED_CHARACTERS)
    if value is None or isinstance(value, bool | int | float):
        return value if not isinstance(value, float) or math.isfinite(value) else None  # as JSON knows it
    if isinstance(value, list | tuple) and np.size(np.array(value, dtype=object)) <= RECORDED_NUMBERS:
        return [recordable(item) for item in value]
    raise DataError(
        f"an episode cannot record {value!r:.80}; wanted text, a number, an image, or a list or array of at most "
        f"{RECORDED_NUMBERS:,} of them"
    )


@frozen
class Sampling:
    """How to sample. Training uses temperature alone; top-p and top-k belong to evaluation."""

    max_tokens: int = 256
    """Longest completion, in tokens, stop token included."""
    temperature: float = 1.0
    """0 picks the likeliest token; its logprobs are those at temperature 1."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0: from all."""
    stop: tuple[str, ...] = ()
    """Stop strings. The tokens up to the one that completes a stop string are kept."""
    stop_tokens: tuple[int, ...] = ()
    """Stop tokens. The stop token itself is kept, as the last one."""
    schema: str = ""
    """A JSON schema that the text must match, as JSON; empty: none. Only for generators whose facts list `schema`, and
    never in training, which needs free samples."""

    def __attrs_post_init__(self) -> None:
        stops(self.stop)
        longest: Any = self.max_tokens
        if type(longest) is bool or not isinstance(longest, Integral) or longest < 1:
            raise DataError(f"max_tokens is {longest!r}, wanted a whole number of at least 1")
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise DataError(f"wanted a temperature and top_k of at least 0, and a top_p above 0 and up to 1: {self}")


def stops(found: Sequence[str]) -> tuple[str, ...]:
    """Return stop strings as a tuple. Raises `DataError` for a single string, whose characters they would be."""
    strings = tuple(found)
    if isinstance(found, str) or not all(isinstance(string, str) and string for string in strings):
        raise DataError(f"stop is {found!r}, wanted a list of strings with at least one character each")
    return strings


@frozen(eq=False)
class Request:
    """One sequence to continue."""

    id: str
    """Identifies the request in errors. Unique among the running requests."""
    tokens: IntArray
    """All tokens before the completion: [prompt]."""
    sampling: Sampling
    """How to sample."""
    seed: int
    """Decides every draw of this request, whatever is batched with it."""
    prefix: str = ""
    """Requests with an equal, non-empty prefix have equal tokens and may share their computation."""
    replica: int | None = None
    """The replica that must continue the sequence, counted from 0. If it is away, the request fails with `RequestLost`.
    None: any replica."""
    progress: int | None = None
    """Whether tokens are reported while they are sampled, if the generator can; see `whet.interfaces.generator`. A
    number: each token with this many of the likeliest ones. None: only the completion is wanted."""


@frozen(eq=False)
class Progress:
    """Tokens of a running completion, as soon as they are sampled. Shown to people, never recorded."""

    id: str
    """The id of the request."""
    begin: int
    """Number of tokens of the completion before these. A request that begins again reports from 0 again."""
    tokens: IntArray
    """[tokens]."""
    logprobs: FloatArray
    """[tokens], as in `Completion`."""
    likeliest: IntArray
    """[tokens, k], the k likeliest tokens at each position, the likeliest first."""
    likeliest_logprobs: FloatArray
    """[tokens, k]."""


@frozen(eq=False)
class Completion:
    """What a generator returns for a request."""

    id: str
    """The id of the request."""
    tokens: IntArray
    """The generated tokens, the stop token included: [completion]."""
    logprobs: FloatArray
    """Logprobs of the tokens, of `log_softmax(logits / temperature)`: [completion]."""
    stop: Stop
    """Why the completion ended."""
    versions: tuple[tuple[int, int], ...]
    """Which weights made which tokens: (first token, version), ascending; usually one entry."""
    columns: Mapping[str, NDArray[Any]] = field(factory=dict)
    """Further columns that the generator records: [prompt + completion, ...], -1 or NaN where nothing is known."""


@frozen
class Reply:
    """A completion as an environment sees it."""

    text: str
    """The response without special tokens. It begins with the prefill, if there was one."""
    tokens: tuple[int, ...]
    """All tokens of the completion."""
    stop: Stop
    """Why the completion ended; `length` for a response that was cut by its limit, or by the end of the context."""
    calls: tuple[Call, ...] = ()
    """The tool calls in the response, if the sequence has tools; see `Model.with_tools`."""


@frozen(eq=False)
class Turn:
    """One response of the model, as it is recorded."""

    prompt: IntArray
    """All tokens before it: [prompt]."""
    completion: Completion
    text: str
    """The response without special tokens, prefill included."""


@frozen
class SpanReward:
    """A reward of a turn, or of some tokens of a turn."""

    name: str
    value: float
    """Unweighted."""
    begin: int
    """Position of the first token in the sequence."""
    end: int
    """Position after the last token."""
    weight: float = 1.0
    """The weight of this reward's name in the total reward."""


@frozen(eq=False)
class Trajectory:
    """One token sequence of an episode: the prompt, then the model's and the environment's tokens in order."""

    tokens: IntArray
    """[L]."""
    loss_mask: BoolArray
    """[L], true where the token is trained: the model produced it at the run's temperature."""
    logprobs: FloatArray
    """[L], the sampler's logprobs, 0 where `loss_mask` is false."""
    versions: NDArray[np.int32]
    """[L], version of the weights that produced the token, -1 where the model did not produce it."""
    prompt_length: int
    """Number of tokens before the model's first."""
    stop: Stop | Literal["context"]
    """Why the last completion ended. `context`: the context was full when the environment asked for another one."""
    turns: tuple[tuple[int, int], ...] = ()
    """The model's responses: the positions of the first token and after the last one. A prefill is not in it."""
    agent: str = ""
    """The agent that the sequence belongs to; empty: the only agent."""
    part: int = 0
    """0 for the first sequence of a conversation. A chat template that rewrites history begins another: 1, and so on.
    They follow each other."""
    rewards: Mapping[str, float] | None = None
    """Every named reward of this sequence, unweighted: of the episode, of the agent, of the sequence, of its turns. All
    parts of a conversation have the same. None: the rewards of the episode."""
    reward: float = 0.0
    """The weighted sum of `rewards`."""
    spans: tuple[SpanReward, ...] = ()
    """The rewards of the turns and tokens of this part. `rewards` includes them."""
    apart: bool = False
    """Whether the sequence, or a part of it, has rewards of its own."""
    columns: Mapping[str, NDArray[Any]] = field(factory=dict)
    """Further columns that the generator recorded: [L, ...]."""


@frozen(eq=False)
class Episode:
    """A finished episode: its sequences and its rewards."""

    environment: str
    """Name of the environment in the run."""
    task: int
    """Position of the task in its split."""
    sample: int
    """Which of the group's samples this is."""
    trajectories: tuple[Trajectory, ...]
    """One sequence, and one more for each fork."""
    rewards: Mapping[str, float]
    """Every named reward, unweighted. If sequences have rewards of their own, the mean over the sequences."""
    reward: float
    """The weighted sum of `rewards`."""
    turns: int
    """Number of the model's responses, over all sequences."""
    messages: tuple[tuple[str, Any], ...] = ()
    """(role, content) of the conversation, for records and reports. See `Message.plain`."""
    task_id: str = ""
    """The task's own name, if it has one."""
    answer: str | None = None
    """In evaluation: the episode's final answer, if its environment extracts one; see `Answering`."""
    undecided: tuple[str, ...] = ()
    """Why graders could not decide about the response; see `whet.errors.Undecided`."""
    gold: str | None = None
    """The reference answer of the task, for records and reports; see `gold_answer`."""
    difficulty: float | None = None
    """The difficulty at which it was played; see `Adaptive`."""
    recorded: Mapping[str, Any] = field(factory=dict)
    """What the environment recorded by `model.record`, as builtins."""

    @property
    def context_full(self) -> bool:
        """Return whether the environment asked for a response for which the context had no room."""
        return any(trajectory.stop == "context" for trajectory in self.trajectories)


@frozen(eq=False)
class Group:
    """All episodes of one task in one step. An advantage estimator compares them."""

    index: int
    """Order of admission, counted from 0 over the whole run. It is also the position in the data."""
    environment: str
    """Name of the environment in the run."""
    task: int
    """Position of the task in its split."""
    episodes: tuple[Episode, ...]
    """One episode for each sample."""
    greedy: Episode | None = None
    """One more episode, at temperature 0, for advantage estimators that ask for it. Never trained on."""

    @property
    def rewards(self) -> FloatArray:
        """Return the episodes' rewards [episodes]."""
        return np.array([e.reward for e in self.episodes], np.float32)

    def compared(self, name: str = "") -> list[FloatArray]:
        """Return the rewards that are compared with each other: one array for each agent.

        An array has one reward for each episode. If sequences of the agent have rewards of their own, the array has one
        reward for each sequence. `name` chooses a named reward, 0 where it is missing; empty: the weighted sum.
        """
        found: dict[str, list[float]] = {}
        apart = {t.agent for e in self.episodes for t in e.trajectories if t.apart}
        for episode in self.episodes:
            first: dict[str, list[float]] = {}
            for t in episode.trajectories:
                own = episode if t.rewards is None else t
                if t.part:
                    continue
                first.setdefault(t.agent, []).append(float((own.rewards or {}).get(name, 0.0) if name else own.reward))
            for agent, values in first.items():
                found.setdefault(agent, []).extend(values if agent in apart else values[:1])
        return [np.array(values, np.float32) for values in found.values()]


def with_ids(calls: tuple[Call, ...], prompt: IntArray, tokens: IntArray) -> tuple[Call, ...]:
    """Return the calls of a completion [completion] after a prompt [prompt] with ids of nine letters and digits.

    Some templates accept no others. They are derived, not drawn: where a template shows ids, an episode that is played
    again has the same tokens.
    """
    seed = blake2b(prompt.tobytes() + tokens.tobytes(), digest_size=8).digest()
    ids = (blake2b(seed, digest_size=5, salt=i.to_bytes(8)).hexdigest()[:9] for i in range(len(calls)))
    return tuple(evolve(call, id=id_) for call, id_ in zip(calls, ids, strict=True))
