"""Parts that play an episode in tests: a player, and a generator with tokens that no encoder would choose."""

from typing import Any

import numpy as np
from attrs import evolve

from whet.data.records import Completion, IntArray, Request, Sampling
from whet.interfaces.generator import listener, listening
from whet.rollout.episode import Player, with_stop_tokens
from whet_testing.fakes import ByteChat, FakeGenerator


def make_player(generator: Any, chat: Any = None, **changes: Any) -> Player:
    """Return a player with short turns and no retries. `changes` overrides fields of the player."""
    defaults: dict[str, Any] = {
        "sampling": Sampling(max_tokens=8),
        "max_context": 0,
        "seed": 0,
        "purpose": "sample",
        "retries": 0,
        "deadline_seconds": 10.0,
    }
    made = Player(generator, chat or ByteChat(), **{**defaults, **changes})
    return evolve(made, sampling=with_stop_tokens(made.sampling, made.chat))


class AltTokens(FakeGenerator):
    """A fake generator that writes each byte of an answer as token byte + 300. No encoder would choose these tokens."""

    async def generate(self, request: Request) -> Completion:
        """Return the completion of one request, in the tokens above."""
        to = listener.get()
        tell = to and evolve(to, call=lambda progress: to.call(evolve(progress, tokens=_alt(progress.tokens))))
        with listening(tell):
            made = await super().generate(request)
        return evolve(made, tokens=_alt(made.tokens))


def _alt(tokens: IntArray) -> IntArray:
    return np.where(tokens < 256, tokens + 300, tokens)


class AltChat(ByteChat):
    """A `ByteChat` that decodes the tokens of `AltTokens`."""

    def decode(self, tokens: Any, skip_special: bool = True) -> str:
        """Return the text of tokens, which may be of both kinds."""
        return super().decode([t - 300 if t >= 300 else t for t in tokens])


def alt(text: str) -> list[int]:
    """Return the tokens in which `AltTokens` answers with this text, the stop token included."""
    return [*(300 + b for b in text.encode()), *ByteChat.stop_tokens]
