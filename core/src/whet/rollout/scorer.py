"""Scores whole conversations with a further model for an environment, e.g. with a reward model.

Requests that arrive while a batch is running form the next batch.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.data.batch import from_sequences
from whet.data.messages import Message, conversation
from whet.errors import DataError

if TYPE_CHECKING:
    from whet.interfaces.backend import Backend
    from whet.interfaces.chat import Tokenizer

logger = logging.getLogger(__name__)

MOST_TOGETHER = 256
"""Largest number of conversations in one batch."""


_TOLD = frozenset(10**i for i in range(12))


def whole(tokens: Any) -> dict[str, Any]:
    """Return the columns of a sequence whose `values` output has, at its last place, the value after all `tokens`.

    `values` are about the state *before* a token, so the sequence has one more token at its end; its id is not read.
    """
    tokens = np.append(np.asarray(tokens, np.int64), 0)
    mask = np.zeros(len(tokens), np.bool_)
    mask[-1] = True
    return {"tokens": tokens, "loss_mask": mask}


class RoleScorer:
    """Scores with the backend of a role, one batch after the other, on a thread of its own."""

    def __init__(
        self, backend: "Callable[[], Backend]", chat: "Callable[[], Tokenizer]", longest: int, role: str
    ) -> None:
        """Take functions that return the parts, which are made after the environments.

        `longest`: number of positions of the model, in tokens; 0: unknown. `role` is the model's name in errors.
        """
        self._backend, self._chat, self._longest, self._role = backend, chat, longest, role
        self._cut = 0
        self._waiting: list[tuple[Any, Future[float]]] = []  # any thread appends
        self._thread = ThreadPoolExecutor(1, "whet-scorer")

    async def value(self, messages: "str | Message | Sequence[Message]", cut: bool = False) -> float:
        """Return the value of a conversation; see `Scorer.value`. Warn about the 1st, 10th, 100th, ... that was cut."""
        tokens = self._fitted(self._chat().training(conversation(messages), "last").tokens, cut)
        answer = Future[float]()
        self._waiting.append((tokens, answer))
        await asyncio.sleep(0)  # requests made in this iteration of the loop join the batch
        self._thread.submit(self._serve)
        return await asyncio.wrap_future(answer)

    def _fitted(self, tokens: Any, cut: bool) -> Any:
        """Return the tokens, cut to their end if they are too many. Raises `DataError` if `cut` is false."""
        if not self._longest or len(tokens) <= self._longest:
            return tokens
        words = f"a conversation has {len(tokens)} tokens for the role {self._role!r}, whose positions end at"
        if not cut:
            raise DataError(
                f"{words} {self._longest}; lower rollout.max_context or rollout.max_tokens, or have the environment "
                "cut what is too long"
            )
        self._cut += 1
        if self._cut in _TOLD:
            logger.warning(f"{words} {self._longest}, so its end is scored alone ({self._cut} of these so far)")
        return tokens[-self._longest :]

    def close(self) -> None:
        """Wait for the running batch and end the thread."""
        self._thread.shutdown()

    def _serve(self) -> None:
        """Score what waits, on the scorer's own thread. Each request asks for this, and may find nothing left."""
        now = self._waiting[:MOST_TOGETHER]
        del self._waiting[: len(now)]
        now = [(tokens, answer) for tokens, answer in now if answer.set_running_or_notify_cancel()]
        if not now:
            return
        try:
            for (_, answer), value in zip(now, self._score([tokens for tokens, _ in now]), strict=True):
                answer.set_result(value)
        except Exception as error:
            for _, answer in now:
                answer.set_exception(error)

    def _score(self, tokens: Sequence[Any]) -> list[float]:
        batch = from_sequences([whole(one) for one in tokens], prompt_lengths=[len(one) for one in tokens])
        values = self._backend().score(batch, ("values",))["values"]
        ends = np.cumsum(batch["lengths"]) - 1
        return [float(value) for value in values[ends]]
