"""The records that travel between environments, generators and algorithms. Arrays are NumPy."""

import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from whet.data.messages import Conversation, conversation

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
    """What grading needs; builtins only. Never shown to the model."""
    id: str = ""
    """A name for records and reports; empty: the position in the split."""


GOLD = "answer"
"""Key of `Task.data` under which environments keep the right answer."""
GOLD_CHARACTERS = 2_000
"""A longer right answer is cut in records: the data of a task may hold whole test suites."""


def gold_answer(task: Task) -> str | None:
    """Return the right answer of a task as text: `answer` in its data, else all of its data; None where it has none."""
    if not task.data:
        return None
    held = task.data.get(GOLD, task.data)
    text = held if isinstance(held, str) else json.dumps(held, ensure_ascii=False, default=repr)
    if len(text) <= GOLD_CHARACTERS:
        return text
    return f"{text[:GOLD_CHARACTERS]} [{len(text) - GOLD_CHARACTERS} more characters]"


@frozen
class Sampling:
    """How to sample. Training uses temperature alone; top-p and top-k belong to evaluation."""

    max_tokens: int = 256
    """Longest completion, in tokens, stop token included."""
    temperature: float = 1.0
    """0 picks the likeliest token; its logprobs are those at temperature 1."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0: all."""
    stop: tuple[str, ...] = ()
    """Stop strings; the tokens up to the one that completes a string are kept."""
    stop_tokens: tuple[int, ...] = ()
    """Stop tokens; the stop token itself is kept, as the last one."""


@frozen(eq=False)
class Request:
    """One sequence to continue."""

    id: str
    """Names it in errors; unique among the requests that run."""
    tokens: IntArray
    """All that stands before the completion: [prompt]."""
    sampling: Sampling
    """How to sample."""
    seed: int
    """Decides every draw of this request, whatever is batched with it."""
    prefix: str = ""
    """Requests with equal, non-empty prefix have equal tokens and may share their computation."""
    replica: int | None = None
    """Which of a generator's replicas is to continue it, counted from 0; where that one is away, the request fails with
    `RequestLost`. None: any."""


@frozen(eq=False)
class Completion:
    """What a generator made of a request."""

    id: str
    """The request's."""
    tokens: IntArray
    """What was generated, the stop token included: [completion]."""
    logprobs: FloatArray
    """Of `log_softmax(logits / temperature)`: [completion]."""
    stop: Stop
    """Why it ended."""
    versions: tuple[tuple[int, int], ...]
    """Spans of the weights that made it: (first token, version), ascending; usually one."""
    columns: Mapping[str, NDArray[Any]] = field(factory=dict)
    """Further per-token columns that the generator can give."""


@frozen
class Reply:
    """A completion as an environment sees it."""

    text: str
    """The decoded completion without special tokens."""
    tokens: tuple[int, ...]
    """All tokens of it."""
    stop: Stop
    """Why it ended; `length` for an answer that was cut."""


@frozen(eq=False)
class Trajectory:
    """One token sequence of an episode: prompt, the model's tokens and the environment's, in order."""

    tokens: IntArray
    """[L]."""
    loss_mask: BoolArray
    """True where the model produced the token: [L]."""
    logprobs: FloatArray
    """The sampler's, 0 where `loss_mask` is false: [L]."""
    versions: NDArray[np.int32]
    """Of the weights that produced the token, -1 where `loss_mask` is false: [L]."""
    prompt_length: int
    """Tokens before the model's first."""
    stop: Stop
    """How the last completion ended."""


@frozen(eq=False)
class Episode:
    """A finished episode: its sequences and what they were worth."""

    environment: str
    """Its name in the run."""
    task: int
    """Position of the task in its split."""
    sample: int
    """Which of the group's samples this is."""
    trajectories: tuple[Trajectory, ...]
    """One, and one more for each fork."""
    rewards: Mapping[str, float]
    """Every named reward, unweighted."""
    reward: float
    """The weighted sum of `rewards`."""
    turns: int
    """Answers of the model, over all sequences."""
    messages: tuple[tuple[str, str], ...] = ()
    """(role, text) as a reader sees the conversation, for records and reports."""
    task_id: str = ""
    """The task's own name, where it has one."""
    answer: str | None = None
    """Of evaluation: what the episode answered, where its environment says so; see `Answering`."""
    undecided: tuple[str, ...] = ()
    """Why graders could not decide about what the model wrote; see `whet.errors.Undecided`."""
    gold: str | None = None
    """The right answer of the task, for records and reports; see `gold_answer`."""


@frozen(eq=False)
class Group:
    """All episodes of one task in one step; what `advantages` compares."""

    index: int
    """Order of admission, counted from 0 over the whole run; also the position in the data."""
    environment: str
    """Name of their environment in the run."""
    task: int
    """Position of their task in its split."""
    episodes: tuple[Episode, ...]
    """One for each sample."""
    greedy: Episode | None = None
    """One more, at temperature 0, where advantages ask for it; never trained on."""

    @property
    def rewards(self) -> FloatArray:
        """The episodes' rewards [episodes]."""
        return np.array([e.reward for e in self.episodes], np.float32)
