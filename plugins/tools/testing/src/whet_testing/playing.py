"""What plays an episode in tests: a player on a fake generator, and one whose tokens no encoder would choose."""

from typing import Any

import numpy as np
from attrs import evolve

from whet.data.records import Completion, Request, Sampling
from whet.rollout.episode import Player, with_stop_tokens
from whet_testing.fakes import ByteChat, FakeGenerator


def make_player(generator: Any, chat: Any = None, **changes: Any) -> Player:
    """Make a player of short turns, which plays no failed episode again; `changes` are its other fields."""
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
    """Spells its answers in tokens (byte + 300) that no encoder would choose for the same text."""

    async def generate(self, request: Request) -> Completion:
        """Answer one request."""
        made = await super().generate(request)
        return evolve(made, tokens=np.where(made.tokens < 256, made.tokens + 300, made.tokens))


class AltChat(ByteChat):
    """Reads them."""

    def decode(self, tokens: Any, skip_special: bool = True) -> str:
        """Turn tokens into text."""
        return super().decode([t - 300 if t >= 300 else t for t in tokens])


def alt(text: str) -> list[int]:
    """Give the tokens of such an answer, the stop token included."""
    return [*(300 + b for b in text.encode()), *ByteChat.stop_tokens]
