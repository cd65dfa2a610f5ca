"""The contract of an endpoint: an OpenAI-compatible address at which programs ask the model.

    model.endpoint()         Endpoints.open     one episode; each response is recorded and trained on
    endpoint.serve: true     Endpoints.serve    a whole run; nothing of it is trained on

The hook `whet_endpoints` names the class that implements `Endpoints`. It is built as `target(section)`, where `section`
is the section `endpoint` of the config, on the driver and only when an endpoint is needed.
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
        """The conversation so far."""
        ...

    @property
    def turns(self) -> int:
        """Responses of the model in this sequence."""
        ...

    def history(self, turns: int) -> tuple[IntArray, Conversation]:
        """Return tokens and messages as they were after this many responses."""
        ...

    def fork_after(self, turns: int) -> Self:
        """Start another sequence of the episode with the history after this many responses."""
        ...

    def fresh(self, tools: Tools = ()) -> Self:
        """Start another sequence of the episode without history, whose prompt describes these tools."""
        ...

    async def turn(self, messages: Conversation, sampling: Sampling, tokens: IntArray | None = None) -> Turn:
        """Append messages, sample a response and record it.

        tokens [appended]: appended in place of what the chat template makes of the messages.
        """
        ...


class Loop(Protocol):
    """The event loop of all episodes, which runs on a thread of its own."""

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine there and return its result."""
        ...

    def try_run(self, coroutine: Coroutine[Any, Any, None]) -> bool:
        """Run a coroutine there, and return False where the loop runs no longer."""
        ...


class RunFiles(Protocol):
    """The files of a run folder that an endpoint writes."""

    @property
    def path(self) -> Path:
        """The run folder."""
        ...

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to a file of JSON lines."""
        ...

    def journal(self, event: str, **details: Any) -> None:
        """Write an event to the journal."""
        ...


@runtime_checkable
class Endpoints(Protocol):
    """Opens endpoints. All endpoints of one object share a host and a port; each endpoint has its own key."""

    def open(
        self, sequence: RecordedSequence, chat: Chat, sampling: Sampling, ignore: Collection[str]
    ) -> AbstractAsyncContextManager[Address]:
        """Open an endpoint for one episode, on the running event loop, until the context ends.

        Each request extends `sequence` or starts another sequence of its episode. A failure of the model cancels the
        body of the context and is raised there.

        :param sequence: the sequence that the episode begins with.
        :param chat: the tokenizer of the model.
        :param sampling: the only sampling that requests may ask for.
        :param ignore: parameters of requests that are not read.
        """
        ...

    def serve(
        self, generator: Generator, chat: Chat, rollout: "RolloutSection", *, max_context: int, seed: int,
        gate: AbstractAsyncContextManager[None], folder: RunFiles, loop: Loop,
    ) -> Callable[[], None]:  # fmt: skip
        """Serve the model of a run from now on, and return the function that ends it; it is safe to call twice.

        :param generator: what samples responses.
        :param chat: the tokenizer of the model.
        :param rollout: the section of the config with the sampling of requests that ask for nothing else.
        :param max_context: the longest sequence in tokens, prompt included; 0: no limit.
        :param seed: the run's.
        :param gate: a context that every request to the generator enters; an evaluation shuts it.
        :param folder: where address, responses and events are written.
        :param loop: the event loop of the run's episodes.
        """
        ...
