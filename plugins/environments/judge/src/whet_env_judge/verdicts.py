"""Reads scores and preferences in what a judge wrote. The last line of the right form counts.

A line that begins with ">" never counts: a judge that quotes the response cannot take over a score in it.
"""

import re

from whet.data.records import Reply

_PAINT = r"[ \t*_#]{0,8}"
_SCORE = re.compile(
    rf"^{_PAINT}Score{_PAINT}:{_PAINT}(-?\d{{1,9}}(?:\.\d{{1,9}})?)(?:[ \t]?/[ \t]?(\d{{1,9}}))?\.?{_PAINT}$",
    re.MULTILINE | re.IGNORECASE | re.ASCII,
)
_BETTER = re.compile(rf"^{_PAINT}Better{_PAINT}:{_PAINT}(A|B|tie)\.?{_PAINT}$", re.MULTILINE | re.IGNORECASE | re.ASCII)


def score_in(reply: Reply, lowest: float, highest: float) -> float | None:
    """Return the score in the last line such as `Score: 7` or `**Score:** 7/10`. None: there is none within the bounds.

    `7/10` counts only if 10 is the highest score.
    """
    found = _last(_SCORE, reply)
    if found is None or (found[2] and float(found[2]) != highest):
        return None
    score = float(found[1])
    return score if lowest <= score <= highest else None


def preference_in(reply: Reply) -> float | None:
    """Return 1 for a last line `Better: A`, 0 for `Better: B`, and 0.5 for `Better: tie`. None: there is none."""
    found = _last(_BETTER, reply)
    return None if found is None else {"a": 1.0, "b": 0.0, "tie": 0.5}[found[1].lower()]


def _last(pattern: re.Pattern[str], reply: Reply) -> re.Match[str] | None:
    """Return the last match in a judge's text. The last line of a text that was cut by its length may be incomplete."""
    text = "\n".join(reply.text.splitlines())
    if reply.stop != "stop":
        text = text.rpartition("\n")[0]
    return next(reversed(list(pattern.finditer(text))), None)
