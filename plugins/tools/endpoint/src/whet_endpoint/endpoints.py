"""The endpoints of a run: one for each episode that asks for one, and one for the run itself."""

from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager

from whet.config.sections import EndpointSection, RolloutSection
from whet.data.records import Sampling
from whet.interfaces.chat import Chat
from whet.interfaces.endpoint import Loop, RecordedSequence, RunFiles
from whet.interfaces.environment import Address
from whet.interfaces.generator import Generator
from whet_endpoint.episode import open_episode
from whet_endpoint.listener import Listener
from whet_endpoint.requests import Rules, check_ignored
from whet_endpoint.rows import RowWriter
from whet_endpoint.run import RunEndpoint, RunResponder


class OpenAIEndpoints:
    """Opens endpoints that share one HTTP server. Obeys `whet.interfaces.endpoint.Endpoints`."""

    def __init__(self, section: EndpointSection, extras: frozenset[str] = frozenset()) -> None:
        """`extras` are the optional parts of requests that the generator supports; see `GeneratorFacts`."""
        self._section, self._listener, self._extras = section, Listener(section), extras

    def open(
        self, sequence: RecordedSequence, chat: Chat, sampling: Sampling, ignore: Collection[str]
    ) -> AbstractAsyncContextManager[Address]:
        """Open an endpoint for one episode."""
        return open_episode(self._listener, sequence, chat, self._rules(sampling, fixed=True, ignore=ignore))

    def serve(
        self, generator: Generator, chat: Chat, rollout: RolloutSection, *, max_context: int, seed: int,
        gate: AbstractAsyncContextManager[None], folder: RunFiles, loop: Loop,
    ) -> Callable[[], None]:  # fmt: skip
        """Serve the model of a run, and return the function that ends it."""
        sampling = Sampling(
            self._section.max_tokens or rollout.max_tokens, rollout.temperature, stop=tuple(rollout.stop),
            stop_tokens=chat.stop_tokens,
        )  # fmt: skip
        rows = RowWriter(folder, self._section.record)
        responder = RunResponder(generator, chat, gate, self._rules(sampling), max_context, seed, rows)
        endpoint = RunEndpoint(loop, self._listener, responder, rows, folder)
        endpoint.open()
        return endpoint.close

    def _rules(self, sampling: Sampling, *, fixed: bool = False, ignore: Collection[str] = ()) -> Rules:
        lenient = self._section.unsupported == "ignore"
        return Rules(sampling, fixed, check_ignored(ignore), lenient, self._extras)
