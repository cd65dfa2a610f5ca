"""Finds the move in a response. The text comes from a model: it may be of any length, and say anything."""

from typing import Literal

LONGEST = 64
"""A longer text is no move."""
OPENING, CLOSING = "<action>", "</action>"


def action_in(text: str, form: Literal["tag", "line"]) -> str | None:
    """Return the move in a response, in lower case, with single spaces. None: it has none.

    `tag`: the last `<action>...</action>`; `line`: the last line that is not empty.
    """
    lowered = text.lower()
    if form == "line":
        found = lowered.rstrip().rpartition("\n")[2]
    else:
        before, closing, _ = lowered.rpartition(CLOSING)
        _, opening, found = before.rpartition(OPENING)
        if not (closing and opening):
            return None
    return " ".join(found.split()) or None if len(found) <= LONGEST else None
