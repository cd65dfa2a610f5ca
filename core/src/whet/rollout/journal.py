"""The journal of groups. Each group ends exactly once: trained, filtered or dropped.

Each row `step` of `journal.jsonl` lists the groups that ended with this step, by their numbers in order of admission:

    {"time": ..., "event": "step", "step": 3, "trained": "8-10,12", "filtered": "11"}

The conformance kit has a check that proves it for a run folder.
"""

from collections.abc import Iterable
from itertools import pairwise

from attrs import frozen

from whet.data.records import Group


@frozen(eq=False)
class Consumed:
    """Groups that ended."""

    trained: tuple[Group, ...] = ()
    filtered: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()

    def __add__(self, other: "Consumed") -> "Consumed":
        return Consumed(self.trained + other.trained, self.filtered + other.filtered, self.dropped + other.dropped)

    def entry(self) -> dict[str, str]:
        """Return the groups as the journal writes them."""
        trained = [group.index for group in self.trained]
        entry = {"trained": ranges(trained), "filtered": ranges(self.filtered), "dropped": ranges(self.dropped)}
        return {outcome: text for outcome, text in entry.items() if text}


def ranges(indices: Iterable[int]) -> str:
    """Return numbers in compact form: [3, 0, 1, 2, 7] -> "0-3,7"."""
    ordered = sorted(indices)
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1), len(ordered)]
    runs = [(ordered[a], ordered[b - 1]) for a, b in pairwise(cuts) if a < b]
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
