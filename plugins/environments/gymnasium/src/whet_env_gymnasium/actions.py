"""Finds the action in a response. The text comes from a model: it may be of any length, and say anything."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from whet.errors import DataError

_LONGEST: Final = 1000
_MOST_NUMBERS: Final = 64
_NUMBER: Final = re.compile(r"(?a)-?\d{1,9}")
_OPENING, _CLOSING = "<action>", "</action>"


@frozen
class Actions:
    """The actions of an environment, as words."""

    kind: str
    """`choice`: one of some; `numbers`: several numbers, separated by white space or commas; `text`: any text."""
    words: tuple[str, ...]
    """For `choice`: a word for each action."""
    first: int = 0
    """For `choice`: the number of the first action."""

    @property
    def named(self) -> str:
        """Return the text about the actions for the model."""
        if self.kind == "choice":
            return ", ".join(self.words)
        return "numbers, separated by spaces" if self.kind == "numbers" else "any text"

    def read(self, text: str) -> Any:
        """Return the action of a response, for the environment. Raises `ValueError` with words for the model."""
        before, closing, _ = text.rpartition(_CLOSING)
        _, opening, found = before.rpartition(_OPENING)
        if not (opening and closing):
            raise ValueError("The response has no action between <action> and </action>.")
        if len(found) > _LONGEST:
            raise ValueError("The action is too long.")
        if self.kind == "text":
            return found
        if self.kind == "numbers":
            return self._numbers(found)
        word = " ".join(found.lower().split())
        if word not in self.words:
            raise ValueError(f"That is none of the actions. They are: {self.named}")
        return self.first + self.words.index(word)

    def _numbers(self, found: str) -> list[int]:
        words = found.replace(",", " ").split()
        if not words or len(words) > _MOST_NUMBERS or not all(map(_NUMBER.fullmatch, words)):
            raise ValueError("The action is not a list of numbers.")
        return [int(word) for word in words]


def actions_of(facts: Mapping[str, Any], words: Sequence[str]) -> Actions:
    """Return the actions of an environment. Raises `DataError` where the words do not fit it.

    :param facts: `kind`, `first` and `count`, of the environment. :param words: empty: numbers.
    """
    kind, first, count = facts["kind"], facts["first"], facts["count"]
    if kind != "choice":
        if words:
            raise DataError(
                f"`actions` names {', '.join(words)}, but the environment's actions are {kind}: leave it out"
            )
        return Actions(kind, ())
    lowered = tuple(" ".join(word.lower().split()) for word in words) or tuple(map(str, range(first, first + count)))
    if len(lowered) != count or len(set(lowered)) != count:
        raise DataError(f"`actions` has {len(lowered)} words, {', '.join(lowered)}; wanted {count} different ones")
    return Actions(kind, lowered, first)
