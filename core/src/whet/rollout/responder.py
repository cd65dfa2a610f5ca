"""Asks a further model for responses, for an environment: a judge, a simulated user, an opponent.

Nothing is recorded or trained on, so a conversation is rendered anew by the model's own chat template at each call.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from whet.data.messages import Message, conversation
from whet.data.randomness import derive_seed
from whet.data.records import Reply, Request, Sampling, stops
from whet.errors import DataError
from whet.rollout.complete import complete
from whet.rollout.recorded import checked_completion

if TYPE_CHECKING:
    from whet.interfaces.chat import Chat
    from whet.interfaces.generator import Generator


class RoleResponder:
    """Writes responses with the generator of a role. Obeys `whet.interfaces.environment.Responder`."""

    def __init__(
        self, generator: "Callable[[], Generator]", chat: "Callable[[], Chat]", max_tokens: int, longest: int, role: str
    ) -> None:
        """Take functions that return the parts, which are made after the environments.

        `max_tokens`: longest response without another limit. `longest`: positions of the model; 0: unknown.
        """
        self._generator, self._chat, self._role = generator, chat, role
        self._max_tokens, self._longest, self._ids = max_tokens, longest, itertools.count()

    async def reply(
        self, messages: "str | Message | Sequence[Message]", *, seed: int, max_tokens: int | None = None,
        stop: Sequence[str] = (), temperature: float | None = None, prefill: str = "",
    ) -> Reply:  # fmt: skip
        """See `Responder.reply`."""
        chat = self._chat()
        tokens = chat.prompt(conversation(messages))
        if prefill:
            tokens = np.concatenate([tokens, chat.encode(prefill)])
        longest = self._max_tokens if max_tokens is None else max_tokens
        if self._longest and len(tokens) >= self._longest:
            raise DataError(
                f"a conversation has {len(tokens)} tokens for the role {self._role!r}, which leaves no room for a "
                f"response in its {self._longest} positions; lower rollout.max_context or rollout.max_tokens, or have "
                "the environment cut what is too long"
            )
        sampling = Sampling(
            max_tokens=min(longest, self._longest - len(tokens)) if self._longest else longest,
            temperature=1.0 if temperature is None else temperature, stop=stops(stop), stop_tokens=chat.stop_tokens,
        )  # fmt: skip
        request = Request(
            f"{self._role}-{seed}-{next(self._ids)}", tokens, sampling, derive_seed(seed, f"role {self._role}")
        )
        completion = checked_completion(await complete(self._generator(), request, chat.decode), request)
        return Reply(prefill + chat.decode(completion.tokens), tuple(completion.tokens.tolist()), completion.stop)
