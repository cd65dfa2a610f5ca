"""A stand-in for a role that writes responses, and environments of other plugins, for tests of environments."""

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from attrs import frozen

from whet.component import Selection
from whet.data.messages import Conversation, Message, conversation
from whet.data.records import Reply, Stop
from whet.plugins.registry import load_plugins

_installed = cache(load_plugins)


@frozen
class Asked:
    """One call of `ScriptedResponder.reply`."""

    messages: Conversation
    seed: int
    max_tokens: int | None
    stop: tuple[str, ...]
    temperature: float | None

    @property
    def text(self) -> str:
        """Return the text of the last message."""
        return self.messages[-1].text


class ScriptedResponder:
    """A role that answers by a rule and keeps what it was asked. Obeys `whet.interfaces.environment.Responder`.

    `ScriptedResponder("Score: 1")` always answers the same. A function computes the answer from the conversation.
    """

    def __init__(self, rule: str | Callable[[Conversation], str], stop: Stop = "stop") -> None:
        self._rule, self._stop = rule, stop
        self.asked: list[Asked] = []
        """All calls so far."""

    async def reply(
        self,
        messages: str | Message | Sequence[Message],
        *,
        seed: int,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
        prefill: str = "",
    ) -> Reply:
        """Return the answer of the rule, after the prefill."""
        await asyncio.sleep(0)
        said = conversation(messages)
        self.asked.append(Asked(said, seed, max_tokens, tuple(stop), temperature))
        text = prefill + (self._rule if isinstance(self._rule, str) else self._rule(said))
        return Reply(text, tuple(text.encode(errors="replace")), self._stop)


def selected(environment: str, **config: Any) -> Selection:
    """Return an installed environment with its config, as a section of a run selects it."""
    component = _installed().find("environments", environment).component
    return Selection("environments", component, component.config(**config))
