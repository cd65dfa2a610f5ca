"""Small stand-ins that obey the interfaces: a model, a generator, a backend and a logger.

Use a stand-in to test code that calls an interface. Test an implementation of an interface with real parts.
"""

import asyncio
import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from attrs import evolve, frozen

from whet.component import Spec
from whet.data import metrics, randomness
from whet.data.batch import Batch
from whet.data.messages import Conversation, Message, Tools, conversation
from whet.data.records import (
    Completion,
    FloatArray,
    IntArray,
    Progress,
    Reply,
    Request,
    Sampling,
    Stop,
    Turn,
    recordable,
)  # fmt: skip
from whet.errors import CheckpointError, ContextFull, WhetError
from whet.interfaces.backend import Weights
from whet.interfaces.environment import Address, EpisodeInfo
from whet.interfaces.generator import OnWeightUpdate, listener
from whet.interfaces.weights import TransferSpec
from whet.plugins.endpoints import InstalledEndpoints
from whet_chat.response import response_format

Answers = str | Sequence[str] | Callable[[Conversation], str]
"""One answer for all turns, a script of answers, or a function from the conversation to the answer."""
Rule = Callable[[str, np.random.Generator], str]
"""(text of the prompt, random generator of the request) -> text of the completion."""


class Done:
    """The handle of a call that has ended."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def result(self) -> Any:
        """Return the result of the call."""
        return self.value

    def done(self) -> bool:
        """Return True: the call has ended."""
        return True


class FakeModel:
    """A model for testing environments. It answers by a script and keeps the conversation.

    `FakeModel("4")` always answers 4. `FakeModel(["calc 2+2", "4"])` answers with one text after the other and fails
    the test when asked for a third. `FakeModel(lambda conversation: ...)` computes each answer. With `room=2` the
    context of each sequence has room for two answers.
    """

    def __init__(self, answers: Answers, stop: Stop = "stop", room: int | None = None) -> None:
        self._next = _asking(answers)
        self._stop, self._room, self._answered = stop, room, 0
        self.messages: list[Message] = []
        """The conversation so far."""
        self.forks: list[FakeModel] = []
        """The sequences that `fork` started from this one."""
        self.agent = ""
        """The agent of the sequence; see `Model.fork`."""
        self.tools: Tools = ()
        """The tools of the sequence; see `Model.with_tools`."""
        self.rewards: list[tuple[str, float, str]] = []
        """The recorded rewards of this sequence: name, value, and `turn`, `sequence` or `agent`."""
        self.log: dict[str, Any] = {}
        """What `record` has recorded."""
        self.endpoints = InstalledEndpoints()
        """What opens the endpoint of the model. Models that share it listen at one address, as those of a run."""
        self.episode = EpisodeInfo("train", True, 0, 0, 0, seed=1, group_seed=2)
        """What the environment is told about the episode. Replace it to test another split, sample or difficulty."""

    async def reply(
        self,
        messages: str | Message | Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
        prefill: str = "",
    ) -> Reply:
        """Append messages to the conversation, and return the next answer, after the prefill."""
        await asyncio.sleep(0)
        if self._answered == self._room:
            raise ContextFull(100, 100)
        self.messages.extend(conversation(messages))
        text = prefill + self._next(tuple(self.messages))
        self._answered += 1
        self.messages.append(Message("assistant", text))
        calls = ByteChat().with_tools(self.tools).parts(Message("assistant", text, written=text)).calls
        return Reply(text, tuple(text.encode(errors="replace")), self._stop, calls)

    def with_tools(self, tools: Tools) -> "FakeModel":
        """Return another sequence without history. Calls in its answers have the format of `ByteChat`."""
        other = self.fork()
        other.messages, other._answered, other.tools = [], 0, tools
        return other

    def fork(self, agent: str = "") -> "FakeModel":
        """Return another sequence with the history so far. All sequences take their answers from one script."""
        other = FakeModel(self._next, self._stop, self._room)
        other.messages, other.agent, other.episode = self.messages[:], agent or self.agent, self.episode
        other.tools = self.tools
        other._answered = self._answered
        self.forks.append(other)
        return other

    def reward(
        self,
        name: str,
        value: float,
        *,
        of: Literal["turn", "sequence", "agent"] = "turn",
        tokens: tuple[int, int] | None = None,
    ) -> None:
        """Record a reward of this sequence in `rewards`."""
        self.rewards.append((name, float(value), of))

    def rewarded(self, given: Mapping[str, float]) -> dict[str, float]:
        """Return the rewards of the episode: the given ones, and the recorded ones as means over the sequences."""
        sequences = list(self._sequences())
        answering = [one for one in sequences if one._answered] or [self]
        totals: dict[str, float] = {}
        for one in answering:
            for other in sequences:
                for name, value, of in other.rewards:
                    hit = other is one or (of == "agent" and other.agent == one.agent)
                    totals[name] = totals.get(name, 0.0) + value * hit / len(answering)
        return {**totals, **{name: totals.get(name, 0.0) + value for name, value in given.items()}}

    def calls(self) -> Counter[str]:
        """Return how many replies, rewards and records the sequences of the episode have so far, by the method."""
        counts = Counter[str]()
        for one in self._sequences():
            counts.update(reply=one._answered, reward=len(one.rewards), record=len(one.log))
        return counts

    def _sequences(self) -> Iterator["FakeModel"]:
        yield self
        for one in self.forks:
            yield from one._sequences()

    def record(self, name: str, value: Any) -> None:
        """Record a value of the episode in `log`."""
        self.log[name] = recordable(value)

    def endpoint(self, *, ignore: Collection[str] = ()) -> AbstractAsyncContextManager[Address]:
        """Open an endpoint that answers by the script. `messages` becomes the last conversation of the endpoint."""
        sequence = _ScriptedSequence(self, self._next, self._stop, [(_NO_TOKENS, tuple(self.messages))])
        return self.endpoints.open(sequence, ByteChat(), Sampling(), ignore)


_NO_TOKENS: IntArray = np.zeros(0, np.int64)


@frozen(eq=False)
class _ScriptedSequence:
    """A sequence of a `FakeModel` behind an endpoint. Obeys `whet.interfaces.endpoint.RecordedSequence`."""

    model: FakeModel
    script: Callable[[Conversation], str]
    stop: Stop
    histories: list[tuple[IntArray, Conversation]]
    """Tokens and messages of the sequence: at the start, and after each response."""
    tools: Tools = ()

    @property
    def messages(self) -> Conversation:
        return self.histories[-1][1]

    @property
    def turns(self) -> int:
        return len(self.histories) - 1

    def history(self, turns: int) -> tuple[IntArray, Conversation]:
        return self.histories[turns]

    def fork(self, agent: str = "", turns: int | None = None) -> "_ScriptedSequence":
        return evolve(self, histories=[self.histories[-1 if turns is None else turns]])

    def fresh(self, tools: Tools = ()) -> "_ScriptedSequence":
        return evolve(self, histories=[(_NO_TOKENS, ())], tools=tools)

    async def turn(self, messages: Conversation, sampling: Sampling, tokens: IntArray | None = None) -> Turn:
        chat, (before, said) = ByteChat().with_tools(self.tools), self.histories[-1]
        asked = (*said, *messages)
        if tokens is None:
            tokens = chat.continuation(said, True, messages) if len(before) else chat.prompt(asked)
        text = self.script(asked)
        prompt, made = np.concatenate([before, tokens]), np.append(chat.encode(text), chat.stop_tokens)
        whole = (*asked, Message("assistant", text))
        self.histories.append((np.concatenate([prompt, made]), whole))
        self.model.messages = list(whole)
        logprobs = np.zeros(len(made), np.float32)
        return Turn(prompt, Completion("scripted", made, logprobs, self.stop, ((0, 0),)), text)

    def forget(self) -> None:
        self.histories.pop()


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
        """Return the tokens of a text."""

    def decode(self, tokens: Any, skip_special: bool = True) -> str:
        """Return the text of tokens."""


class ByteCodec:
    """The smallest codec: one token for each byte. Token 256 ends a turn."""

    stop_tokens: tuple[int, ...] = (256,)

    def encode(self, text: str) -> IntArray:
        """Return the tokens of a text."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def decode(self, tokens: Any, skip_special: bool = True) -> str:
        """Return the text of tokens."""
        return bytes(int(t) for t in tokens if t < 256).decode(errors="replace")


class ByteChat(ByteCodec):
    """The smallest stand-in for a `ChatTokenizer`: a line `role: text` for each message, a token for each byte.

    A tool call has the format of Qwen, `<tool_call>{"name": "f", "arguments": {}}</tool_call>`.
    """

    _tools: Tools = ()

    def with_tools(self, tools: Tools) -> "ByteChat":
        """Return a copy whose prompts begin with these tools."""
        other = copy.copy(self)
        other._tools = tools
        return other

    def render(self, conversation: Conversation, *, generation_prompt: bool = False) -> str:
        """Return the text of a conversation, tools first."""
        text = "".join(f"tool: {tool}\n" for tool in self._tools) + _lines(conversation)
        return text + "assistant: " * generation_prompt

    def prompt(self, conversation: Conversation) -> IntArray:
        """Return the tokens of the prompt that the model continues."""
        return self.encode(self.render(conversation, generation_prompt=True))

    def message(self, tokens: IntArray, prefill: str = "") -> Message:
        """Return a completion as the message of the model."""
        text = prefill + self.decode(tokens)
        return Message("assistant", text, written=text)

    def parts(self, message: Message) -> Message:
        """Return a message with the calls apart that the model wrote in it."""
        return response_format(self).read(message.written, self._tools) if message.written and self._tools else message

    def continuation(self, history: Conversation, stopped: bool, messages: Conversation) -> IntArray:
        """Return the tokens to append after the last completion of the model."""
        end = np.asarray([] if stopped else self.stop_tokens, np.int64)
        return np.concatenate([end, self.encode(f"\n{_lines(messages)}assistant: ")])

    def pieces(self, tokens: IntArray) -> list[str]:
        """Return the text of each token."""
        return [self.decode([token]) for token in tokens]

    def token_bytes(self, tokens: IntArray) -> list[bytes | None]:
        """Return the bytes of each token."""
        return [bytes([token]) if token < 256 else b"" for token in tokens]


def _lines(conversation: Conversation) -> str:
    return "".join(f"{message.role}: {message.text}{_called(message)}\n" for message in conversation)


def _called(message: Message) -> str:
    calls = ({"name": call.name, "arguments": json.loads(call.arguments)} for call in message.calls)
    return "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)


class FakeGenerator:
    """A generator that answers by a script or a rule, with made-up logprobs.

    It passes `GeneratorContract`. The random generator that a rule gets depends on the seed of the request alone. A
    script of several answers is followed in the order of the requests.
    """

    def __init__(self, rule: str | Sequence[str] | Rule, codec: Codec | None = None, delay_seconds: float = 0.0):
        self._rule = _ruling(rule)
        self._codec: Codec = codec or ByteCodec()
        self._delay = delay_seconds
        self.version = 0
        """Version of the weights that the generator pretends to hold."""
        self.requests: list[Request] = []
        """All requests so far."""
        self.cancelled: list[str] = []
        """Ids of the requests that were cancelled."""
        self.asleep, self.closed = False, False

    async def generate(self, request: Request) -> Completion:
        """Return the completion of one request."""
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
        await _report(request.id, tokens, logprobs)
        return Completion(request.id, tokens, logprobs, stop, ((0, version),))

    def _cut(self, tokens: IntArray, request: Request) -> tuple[IntArray, Stop]:
        """Return the tokens up to a stop token, a stop string or the limit, whichever comes first."""
        sampling = request.sampling
        whole = np.concatenate([tokens, np.asarray(sampling.stop_tokens[:1], np.int64)])
        for end in range(1, min(len(whole), sampling.max_tokens) + 1):
            text = self._codec.decode(whole[:end]) if sampling.stop else ""
            if whole[end - 1] in sampling.stop_tokens or any(s in text for s in sampling.stop):
                return whole[:end], "stop"
        return whole[: sampling.max_tokens], "length"

    def receive_weights(self, spec: TransferSpec, version: int, on_weight_update: OnWeightUpdate = "drain") -> Done:
        """Take over the version, and no weights."""
        self.version = version
        return Done()

    def sleep(self) -> None:
        """Refuse requests until `wake`. No memory is freed, because none is held."""
        self.asleep = True

    def wake(self) -> None:
        """Accept requests again."""
        self.asleep = False

    def close(self) -> None:
        """Set `closed`."""
        self.closed = True


async def _report(id_: str, tokens: IntArray, logprobs: FloatArray) -> None:
    """Report tokens one by one to the listener of this task, as a generator does while it samples.

    The likeliest tokens at each position are the sampled one and those after it, each half as likely as the last.
    """
    if (to := listener.get()) is None:
        return
    ranks = np.arange(to.likeliest)
    for i, token in enumerate(tokens):
        likeliest = (token + ranks)[None], (logprobs[i] - np.log(2) * ranks).astype(np.float32)[None]
        to.call(Progress(id_, i, tokens[i : i + 1], logprobs[i : i + 1], *likeliest))
        await asyncio.sleep(0)


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
    """Return an output from values [N]: 0 where `loss_mask` is false.

    A value is repeated K times where the output has K numbers for each token. `topk_ids` holds 0 to K - 1.
    """
    kept = np.where(batch["loss_mask"], values, np.float32(0))
    kind, _, k = name.partition(":")
    width = batch["topk_ids"].shape[1] if kind == "logprobs_at" else int(k) if kind.startswith("topk_") else 0
    wide = np.repeat(kept[:, None], width, 1) if width else kept
    return np.tile(np.arange(width, dtype=np.int32), (batch.tokens, 1)) if kind == "topk_ids" else wide


class FakeBackend:
    """A backend that trains nothing: it counts steps, keeps its batches and scores by a rule."""

    def __init__(self, score: Callable[[str, Batch], Any] | None = None) -> None:
        self._score = score or (lambda output, batch: np.full(batch.tokens, -1.0, np.float32))
        self.step = 0
        """Optimizer steps taken."""
        self.trained: list[Batch] = []
        """Batches of all calls of `train`."""
        self.sent: list[TransferSpec] = []
        """Links of all calls of `send_weights`."""
        self.asleep, self.closed = False, False

    def train(self, batch: Batch, loss: Spec, count_over: Batch | None = None) -> Mapping[str, metrics.Metric]:
        """Keep the batch, and count a step if any token is to be learned. Return metrics as a real backend does."""
        _refuse_asleep("backend", self.asleep)
        self.trained.append(batch)
        self.step += bool(np.any((count_over or batch)["loss_mask"]))
        return {"grad_norm": metrics.mean(1.0), "lr": metrics.mean(0.1), **self.evaluate(batch, loss)}

    def evaluate(self, batch: Batch, loss: Spec) -> Mapping[str, metrics.Metric]:
        """Return a loss that falls with every step, and the number of tokens to learn."""
        _refuse_asleep("backend", self.asleep)
        return {"loss": metrics.mean(1.0 / (1 + self.step)), "tokens": metrics.total(int(batch["loss_mask"].sum()))}

    def score(self, batch: Batch, outputs: tuple[str, ...], weights: Weights = "policy") -> dict[str, Any]:
        """Return scores by the rule, 0 where `loss_mask` is false. Of K numbers for a token all K are equal."""
        _refuse_asleep("backend", self.asleep)
        return {name: _columns(name, batch, self._score(name, batch)) for name in outputs}

    def send_weights(self, spec: TransferSpec) -> Done:
        """Keep the spec."""
        _refuse_asleep("backend", self.asleep)
        self.sent.append(spec)
        return Done()

    def save(self, folder: Path) -> Done:
        """Write the number of steps to `fake.json`."""
        _refuse_asleep("backend", self.asleep)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fake.json").write_text(json.dumps({"step": self.step}), encoding="utf-8")
        return Done()

    def load(self, folder: Path) -> None:
        """Read the number of steps from `fake.json`."""
        _refuse_asleep("backend", self.asleep)
        try:
            self.step = json.loads((folder / "fake.json").read_text(encoding="utf-8"))["step"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder} holds nothing that a FakeBackend saved: {error}") from error

    def export(self, folder: Path) -> None:
        """Write the same file as `save`."""
        self.save(folder)

    def sleep(self) -> None:
        """Refuse work until `wake`. No memory is freed, because none is held."""
        self.asleep = True

    def wake(self) -> None:
        """Accept work again."""
        self.asleep = False

    def close(self) -> None:
        """Set `closed`."""
        self.closed = True


class MemoryLogger:
    """A logger that keeps metrics and status texts in memory."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        """(step, metrics) in the order logged."""
        self.statuses: list[str] = []
        self.failed: bool | None = None
        """The argument of the first call of `close`; None before that call."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step."""
        self.rows.append((step, dict(metrics)))

    def status(self, text: str) -> None:
        """Keep the status text."""
        self.statuses.append(text)

    def rewind(self, step: int) -> None:
        """Remove the rows of later steps."""
        self.rows = [row for row in self.rows if row[0] <= step]

    def close(self, failed: bool) -> None:
        """Set `failed` at the first call."""
        self.failed = failed if self.failed is None else self.failed

    def curve(self, name: str) -> Iterable[tuple[int, float]]:
        """Return (step, number) of one metric."""
        return [(step, row[name]) for step, row in self.rows if name in row]
