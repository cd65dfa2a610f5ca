"""What a call of a tool comes to, in the process that hosts the tool."""

from typing import Any

from attrs import frozen


class Broken(Exception):  # noqa: N818 - it says what the server is
    """No further call can be answered."""


@frozen
class Answer:
    """The answer of a tool."""

    text: str
    error: bool = False
    """Whether it is the description of an error, for the model to read."""
    state: dict[str, Any] | None = None
    """The state of the episode after the call. None: the state has not changed."""
