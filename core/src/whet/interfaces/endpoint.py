"""The contract of an endpoint: an OpenAI-compatible address to which programs send requests for the model.

    model.endpoint()         Endpoints.open     for one episode; each response is recorded and trained on
    endpoint.serve: true     Endpoints.serve    for a whole run; no response is trained on

The hook `whet_endpoints` names the class that implements `Endpoints`. The class is built on the driver, and only when
an endpoint is needed. It is called as `target(section, extras)`: `section` is the section `endpoint` of the config, and
`extras` are the optional parts of requests that the generator supports, from its facts.
"""

from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, runtime_checkable

from whet.data.messages import Conversation, Tools
from whet.data.records import IntArray, Sampling, Turn
from whet.interfaces.chat import Chat
from whet.interfaces.environment import Address
from whet.interfaces.generator import Generator

if TYPE_CHECKING:
    from whet.config.sections import RolloutSection

Result = TypeVar("Result")


class RecordedSequence(Protocol):
    """One sequence of an episode, with the tokens of each response as the model sampled them."""

    @property
    def messages(self) -> Conversation:
        """Return the conversation so far."""

    @property
    def turns(self) -> int:
        """Return the number of responses of the model in this sequence."""

    def history(self, turns: int) -> tuple[IntArray, Conversation]:
        """Return the tokens and messages of the sequence after its first `turns` responses."""

    def fork(self, agent: str = "", turns: int | None = None) -> Self:
        """Start another sequence of the episode, and return it. Its history is `history(turns)`. None: all turns."""

    def fresh(self, tools: Tools = ()) -> Self:
        """Start another sequence of the episode, and return it. It has no history; its prompt describes the tools."""

    async def turn(self, messages: Conversation, sampling: Sampling, tokens: IntArray | None = None) -> Turn:
        """Append messages, sample a response, record it and return it.

        tokens [appended]: if given, these tokens are appended in place of the tokens that the chat template makes of
        the messages.
        """

    def forget(self) -> None:
        """Remove the last response, and the messages with which it was asked for."""


class Loop(Protocol):
    """The event loop of all episodes. It runs on its own thread."""

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the event loop, and return its result."""

    def try_run(self, coroutine: Coroutine[Any, Any, None]) -> bool:
        """Run a coroutine on the event loop. Return False if the event loop no longer runs."""


class RunFiles(Protocol):
    """The files of a run folder that an endpoint writes."""

    @property
    def path(self) -> Path:
        """Return the run folder."""

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to a file of JSON lines."""

    def journal(self, event: str, **details: Any) -> None:
        """Write an event to the journal."""


@runtime_checkable
class Endpoints(Protocol):
    """Opens endpoints. All endpoints of one object share a host and a port; each endpoint has its own key."""

    def open(
        self, sequence: RecordedSequence, chat: Chat, sampling: Sampling, ignore: Collection[str]
    ) -> AbstractAsyncContextManager[Address]:
        """Open an endpoint for one episode, on the running event loop, until the context ends.

        Each request extends `sequence` or starts another sequence of the same episode. If the model fails, the body of
        the context is cancelled, and the context raises the error.

        :param sequence: the sequence that the episode begins with.
        :param chat: the tokenizer of the model.
        :param sampling: the sampling parameters of all requests. Requests may not ask for others.
        :param ignore: the parameters of requests that are ignored.
        """

    def serve(
        self, generator: Generator, chat: Chat, rollout: "RolloutSection", *, max_context: int, seed: int,
        gate: AbstractAsyncContextManager[None], folder: RunFiles, loop: Loop,
    ) -> Callable[[], None]:  # fmt: skip
        """Serve the model of a run from now on, and return a function that ends the service.

        A second call of this function does nothing.

        :param generator: the generator that samples responses.
        :param chat: the tokenizer of the model.
        :param rollout: the section `rollout` of the config: the default sampling parameters of requests.
        :param max_context: the longest sequence in tokens, prompt included; 0: no limit.
        :param seed: the seed of the run.
        :param gate: a context that every request to the generator enters. An evaluation closes the gate.
        :param folder: the run folder, to which the address, responses and events are written.
        :param loop: the event loop of the run's episodes.
        """
