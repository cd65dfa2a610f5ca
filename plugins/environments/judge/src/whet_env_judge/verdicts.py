"""Reads scores and preferences in what a judge wrote. The last line of the right form counts."""

from whet.data.records import Reply
from whet_data.quoting import answer_line


def score_in(reply: Reply, lowest: float, highest: float) -> float | None:
    """Return the score in the last line such as `Score: 7` or `**Score:** 7/10`. None: there is none within the bounds.

    `7/10` counts only if 10 is the highest score.
    """
    found = answer_line(reply, "Score", r"-?\d{1,9}(?:\.\d{1,9})?(?:[ \t]?/[ \t]?\d{1,9})?")
    number, _, most = (found or "nan").partition("/")
    score = float(number)
    return score if lowest <= score <= highest and (not most or float(most) == highest) else None


def preference_in(reply: Reply) -> float | None:
    """Return 1 for a last line `Better: A`, 0 for `Better: B`, and 0.5 for `Better: tie`. None: there is none."""
    found = answer_line(reply, "Better", "A|B|tie")
    return {"a": 1.0, "b": 0.0, "tie": 0.5}[found.lower()] if found else None
