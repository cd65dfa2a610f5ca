"""Requests that are not answered, or not as they were asked."""

from typing import Any

from whet.errors import WhetError


class Refused(WhetError):  # noqa: N818 - it says what becomes of the request
    """A request is not answered, or not as it was asked."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def unwanted(name: str, value: Any, wanted: str) -> Refused:
    """Say that a parameter has a value that it cannot have."""
    return Refused(400, f"{name} is {value!r:.80}, wanted {wanted}", name)
