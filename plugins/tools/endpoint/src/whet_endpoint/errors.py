"""Requests that get an error as their response."""

import logging
from typing import Any

from whet.errors import WhetError, printable

logger = logging.getLogger(__name__)


class ApiError(WhetError):
    """A request gets an error as its response, with a status of HTTP and in the terms of OpenAI's API."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def unwanted(name: str, value: Any, wanted: str) -> ApiError:
    """Return the error for a parameter with a value that it cannot have."""
    return ApiError(400, f"{name} is {value!r:.80}, wanted {wanted}", name)


def failed_inside(error: Exception) -> ApiError:
    """Log an error that is none of the request's, and return what the client is told in its place."""
    words = printable(f"{type(error).__name__}: {error}"[:500])
    logger.error("a request at the endpoint failed inside: %s", words)
    return ApiError(500, "the request is valid, and no response could be made")
