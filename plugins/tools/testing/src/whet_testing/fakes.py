"""Small stand-ins that obey the interfaces: a model, a generator, a backend and a logger.

Use them to test what stands on an interface. What implements one is tested with real parts.
"""

import asyncio
import copy
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from attrs import evolve, frozen

from whet.component import Spec
from whet.data import metrics, randomness
from whet.data.batch import Batch
from whet.data.calls import CallFormat
from whet.data.messages import Conversation, Message, Tools, conversation
from whet.data.records import Completion, IntArray, Reply, Request, Sampling, Stop, Turn
from whet.errors import CheckpointError, WhetError
from whet.interfaces.backend import Weights
from whet.interfaces.environment import Address
from whet.interfaces.generator import OnWeightUpdate
from whet.interfaces.weights import TransferSpec
from whet.plugins.endpoints import InstalledEndpoints

Answers = str | Sequence[str] | Callable[[Conversation], str]
"""One answer for ever, one answer after another, or a rule."""
Rule = Callable[[str, np.random.Generator], str]
"""(text of the prompt, the request's own randomness) -> text of the completion."""


class Done:
    """A call that has ended."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def result(self) -> Any:
        """Give its result."""
        return self.value

    def done(self) -> bool:
        """Yes."""
        return True


class FakeModel:
    """A model for testing environments: it answers by script and keeps the conversation.

    `FakeModel("4")` always says 4; `FakeModel(["calc 2+2", "4"])` says one after the other and fails when
    asked once more; `FakeModel(lambda conversation: ...)` follows a rule.
    """

    def __init__(self, answers: Answers, stop: Stop = "stop") -> None:
        self._next = _asking(answers)
        self._stop = stop
        self.messages: list[Message] = []
        """The conversation so far."""
        self.forks: list[FakeModel] = []
        """The sequences that were started from this one."""

    async def reply(self, messages: str | Message | Sequence[Message]) -> Reply:
        """Append messages and answer."""
        await asyncio.sleep(0)
        self.messages.extend(conversation(messages))
        text = self._next(tuple(self.messages))
        self.messages.append(Message("assistant", text))
        return Reply(text, tuple(text.encode(errors="replace")), self._stop)

    def fork(self) -> "FakeModel":
        """Start another sequence with the history so far; all sequences draw on one script."""
        other = FakeModel(self._next, self._stop)
        other.messages = self.messages[:]
        self.forks.append(other)
        return other

    def endpoint(self, *, ignore: Collection[str] = ()) -> AbstractAsyncContextManager[Address]:
        """Open an endpoint that responds by the script; the last conversation there is kept."""
        sequence = _ScriptedSequence(self, self._next, self._stop, [(_NO_TOKENS, tuple(self.messages))])
        return InstalledEndpoints().open(sequence, ByteChat(), Sampling(), ignore)


_NO_TOKENS: IntArray = np.zeros(0, np.int64)


@frozen(eq=False)
class _ScriptedSequence:
    """The sequences of a `FakeModel` behind an endpoint. Obeys `whet.interfaces.endpoint.RecordedSequence`."""

    model: FakeModel
    script: Callable[[Conversation], str]
    stop: Stop
    marks: list[tuple[IntArray, Conversation]]
    """Tokens and messages in the beginning and after each response."""
    tools: Tools = ()

    @property
    def messages(self) -> Conversation:
        return self.marks[-1][1]

    @property
    def turns(self) -> int:
        return len(self.marks) - 1

    def history(self, turns: int) -> tuple[IntArray, Conversation]:
        return self.marks[turns]

    def fork_after(self, turns: int) -> "_ScriptedSequence":
        return evolve(self, marks=[self.marks[turns]])

    def fresh(self, tools: Tools = ()) -> "_ScriptedSequence":
        return evolve(self, marks=[(_NO_TOKENS, ())], tools=tools)

    async def turn(self, messages: Conversation, sampling: Sampling, tokens: IntArray | None = None) -> Turn:
        chat, (before, said) = ByteChat().with_tools(self.tools), self.marks[-1]
        asked = (*said, *messages)
        if tokens is None:
            tokens = chat.continuation(said, True, messages) if len(before) else chat.prompt(asked)
        text = self.script(asked)
        prompt, made = np.concatenate([before, tokens]), np.append(chat.encode(text), chat.stop_tokens)
        whole = (*asked, Message("assistant", text))
        self.marks.append((np.concatenate([prompt, made]), whole))
        self.model.messages = list(whole)
        logprobs = np.zeros(len(made), np.float32)
        return Turn(prompt, Completion("scripted", made, logprobs, self.stop, ((0, 0),)), text)


def _asking(answers: Answers) -> Callable[[Conversation], str]:
    if callable(answers):
        return answers
    if isinstance(answers, str):
        return lambda messages: answers
    left = iter(answers)

    def following(messages: Conversation) -> str:
        text = next(left, None)
        if text is None:
            raise AssertionError(f"the environment asked for answer {len(answers) + 1} of a script of {len(answers)}")
        return text

    return following


class Codec(Protocol):
    """The part of a `ChatTokenizer` that a fake generator needs."""

    stop_tokens: tuple[int, ...]

    def encode(self, text: str) -> IntArray:
        """Turn text into tokens."""
        ...

    def decode(self, tokens: Any, skip_special: bool = True) -> str:
        """Turn tokens into text."""
        ...


class ByteCodec:
    """The smallest codec: a token for each byte, and token 256 ends a turn."""

    stop_tokens: tuple[int, ...] = (256,)

    def encode(self, text: str) -> IntArray:
        """Turn text into tokens."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def decode(self, tokens: Any, skip_special: bool = True) -> str:
        """Turn tokens into text."""
        return bytes(int(t) for t in tokens if t < 256).decode(errors="replace")


class ByteChat(ByteCodec):
    """The smallest stand-in for a `ChatTokenizer`: `role: text` in lines, a token for each byte.

    Calls of tools are written as Qwen does, `<tool_call>{"name": "f", "arguments": {}}</tool_call>`.
    """

    call_format = CallFormat("", "<tool_call>", None, "name", "arguments")
    _tools: Tools = ()

    def with_tools(self, tools: Tools) -> "ByteChat":
        """Give one whose prompts begin with these tools."""
        other = copy.copy(self)
        other._tools = tools
        return other

    def prompt(self, conversation: Conversation) -> IntArray:
        """Give the tokens that the model is to continue."""
        return self.encode("".join(f"tool: {tool}\n" for tool in self._tools) + _lines(conversation))

    def continuation(self, history: Conversation, stopped: bool, messages: Conversation) -> IntArray:
        """Give the tokens to append after the model's last completion."""
        end = np.asarray([] if stopped else self.stop_tokens, np.int64)
        return np.concatenate([end, self.encode("\n" + _lines(messages))])

    def pieces(self, tokens: IntArray) -> list[str]:
        """Give the text of each token."""
        return [self.decode([token]) for token in tokens]


def _lines(conversation: Conversation) -> str:
    return "".join(f"{message.role}: {message.text}{_called(message)}\n" for message in conversation) + "assistant: "


def _called(message: Message) -> str:
    calls = ({"name": call.name, "arguments": json.loads(call.arguments)} for call in message.calls)
    return "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)


class FakeGenerator:
    """A generator that answers by script or by a rule, with made-up logprobs, and keeps the whole contract.

    A rule may draw from the randomness it is given, which depends on the request's seed alone. A script of
    several answers is followed in the order of the requests.
    """

    def __init__(self, rule: str | Sequence[str] | Rule, codec: Codec | None = None, delay_seconds: float = 0.0):
        self._rule = _ruling(rule)
        self._codec: Codec = codec or ByteCodec()
        self._delay = delay_seconds
        self.version = 0
        """Of the weights it pretends to hold."""
        self.requests: list[Request] = []
        """All that it was asked."""
        self.cancelled: list[str] = []
        """Ids of the requests that were cancelled."""
        self.asleep, self.closed = False, False

    async def generate(self, request: Request) -> Completion:
        """Answer one request."""
        _refuse_asleep("generator", self.asleep)
        self.requests.append(request)
        version = self.version
        try:
            await asyncio.sleep(self._delay)
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            raise
        sampling = request.sampling
        rng = randomness.generator(request.seed if sampling.temperature > 0 else 0, "fake generator")
        text = self._rule(self._codec.decode(request.tokens, skip_special=False), rng)
        tokens, stop = self._cut(self._codec.encode(text), request)
        logprobs = -rng.exponential(size=len(tokens)).astype(np.float32)
        return Completion(request.id, tokens, logprobs, stop, ((0, version),))

    def _cut(self, tokens: IntArray, request: Request) -> tuple[IntArray, Stop]:
        """End at a stop token, at a stop string or at the limit, whichever comes first."""
        sampling = request.sampling
        whole = np.concatenate([tokens, np.asarray(sampling.stop_tokens[:1], np.int64)])
        for end in range(1, min(len(whole), sampling.max_tokens) + 1):
            text = self._codec.decode(whole[:end]) if sampling.stop else ""
            if whole[end - 1] in sampling.stop_tokens or any(s in text for s in sampling.stop):
                return whole[:end], "stop"
        return whole[: sampling.max_tokens], "length"

    def receive_weights(self, link: TransferSpec, version: int, on_weight_update: OnWeightUpdate = "drain") -> Done:
        """Pretend to take new weights."""
        self.version = version
        return Done()

    def sleep(self) -> None:
        """Answer nothing from now on; nothing is held that could be given back."""
        self.asleep = True

    def wake(self) -> None:
        """Answer again."""
        self.asleep = False

    def close(self) -> None:
        """Remember it."""
        self.closed = True


def _refuse_asleep(role: str, asleep: bool) -> None:
    if asleep:
        raise WhetError(f"the {role} sleeps; wake it first")


def _ruling(rule: str | Sequence[str] | Rule) -> Rule:
    if callable(rule):
        return rule
    answers = itertools.repeat(rule) if isinstance(rule, str) else iter(rule)

    def following(prompt: str, rng: np.random.Generator) -> str:
        text = next(answers, None)
        if text is None:
            raise AssertionError("the generator was asked more often than its script is long")
        return text

    return following


def _columns(name: str, batch: Batch, values: Any) -> Any:
    """Mask what a fake backend gives, and repeat it where the output is of several tokens at each place."""
    kept = np.where(batch["loss_mask"], values, np.float32(0))
    kind, _, k = name.partition(":")
    width = batch["topk_ids"].shape[1] if kind == "logprobs_at" else int(k) if kind.startswith("topk_") else 0
    wide = np.repeat(kept[:, None], width, 1) if width else kept
    return np.tile(np.arange(width, dtype=np.int32), (batch.tokens, 1)) if kind == "topk_ids" else wide


class FakeBackend:
    """A backend that trains nothing: it counts steps, remembers what it was given and scores by a rule."""

    def __init__(self, score: Callable[[str, Batch], Any] | None = None) -> None:
        self._score = score or (lambda output, batch: np.full(batch.tokens, -1.0, np.float32))
        self.step = 0
        """Optimizer steps taken."""
        self.trained: list[Batch] = []
        """What it was trained on."""
        self.sent: list[TransferSpec] = []
        """Hand-overs of weights."""
        self.asleep, self.closed = False, False

    def train(self, batch: Batch, loss: Spec, count_over: Batch | None = None) -> Mapping[str, metrics.Metric]:
        """Remember the batch, and count a step unless no token is to be learned."""
        _refuse_asleep("backend", self.asleep)
        self.trained.append(batch)
        self.step += bool(np.any((count_over or batch)["loss_mask"]))
        return {"grad_norm": metrics.mean(1.0), "lr": metrics.mean(0.1), **self.evaluate(batch, loss)}

    def evaluate(self, batch: Batch, loss: Spec) -> Mapping[str, metrics.Metric]:
        """Give a loss that falls with every step."""
        _refuse_asleep("backend", self.asleep)
        return {"loss": metrics.mean(1.0 / (1 + self.step)), "tokens": metrics.total(int(batch["loss_mask"].sum()))}

    def score(self, batch: Batch, outputs: tuple[str, ...], weights: Weights = "policy") -> dict[str, Any]:
        """Score by the rule; 0 where `loss_mask` is false. Outputs of K numbers for each token have K equal ones."""
        _refuse_asleep("backend", self.asleep)
        return {name: _columns(name, batch, self._score(name, batch)) for name in outputs}

    def send_weights(self, link: TransferSpec) -> Done:
        """Remember the link."""
        _refuse_asleep("backend", self.asleep)
        self.sent.append(link)
        return Done()

    def save(self, folder: Path) -> Done:
        """Write the number of steps."""
        _refuse_asleep("backend", self.asleep)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fake.json").write_text(json.dumps({"step": self.step}), encoding="utf-8")
        return Done()

    def load(self, folder: Path) -> None:
        """Read the number of steps."""
        _refuse_asleep("backend", self.asleep)
        try:
            self.step = json.loads((folder / "fake.json").read_text(encoding="utf-8"))["step"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder} holds nothing that a FakeBackend saved: {error}") from error

    def export(self, folder: Path) -> None:
        """Write what it has."""
        self.save(folder)

    def sleep(self) -> None:
        """Work no more from now on; nothing is held that could be given back."""
        self.asleep = True

    def wake(self) -> None:
        """Work again."""
        self.asleep = False

    def close(self) -> None:
        """Remember it."""
        self.closed = True


class MemoryLogger:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        """(step, metrics) in the order logged."""
        self.statuses: list[str] = []
        self.failed: bool | None = None
        """What `close` was told; None before it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the numbers of a step."""
        self.rows.append((step, dict(metrics)))

    def status(self, text: str) -> None:
        """Keep the text."""
        self.statuses.append(text)

    def rewind(self, step: int) -> None:
        """Forget later rows."""
        self.rows = [row for row in self.rows if row[0] <= step]

    def close(self, failed: bool) -> None:
        """Keep the first verdict."""
        self.failed = failed if self.failed is None else self.failed

    def curve(self, name: str) -> Iterable[tuple[int, float]]:
        """Give (step, number) of one metric."""
        return [(step, row[name]) for step, row in self.rows if name in row]
