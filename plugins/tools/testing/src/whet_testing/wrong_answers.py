"""Wrong responses that resemble a right one. A grader that looks for the right answer anywhere accepts them."""

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"[-+]?\d+([.,/]\d+)*")
_WORD = re.compile(r"\w+")


def holds(text: str, answer: str) -> bool:
    """Return whether a text holds an answer as a word or number of its own."""
    return bool(answer) and re.search(_alone(answer), text) is not None


def near(answer: str) -> list[str]:
    """Return wrong answers of which the right one is a part: 127 and 712 for 12. Empty: no wrong answer is certain."""
    if _NUMBER.fullmatch(answer):
        return [f"{answer}7", f"7{answer}"]
    return [f"{answer}x", f"x{answer}"] if _WORD.fullmatch(answer) else []


def wrong_variants(response: str, answer: str, others: Sequence[tuple[str, str]]) -> list[str]:
    """Return wrong variants of a right response.

    answer: the right answer, as a part of the response. others: (response, answer) of other tasks, whose answers
    differ. The variants hold a longer answer, or list several answers. The right answer is neither first nor last.
    """
    found = [_replaced(response, answer, other) for other in near(answer)]
    around = [other for _, other in others] or near(answer)
    if len(around) > 1:
        found.append(_replaced(response, answer, f"{around[0]}, {answer}, {around[1]}"))
    if len(others) > 1:
        found.append("\n".join((others[0][0], response, others[1][0])))
    return [text for text in found if text != response]


def _replaced(response: str, answer: str, other: str) -> str:
    return re.sub(_alone(answer), lambda match: other, response)


def _alone(answer: str) -> str:
    return rf"(?<!\w){re.escape(answer)}(?!\w)"
