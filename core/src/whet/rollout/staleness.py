"""When groups are admitted and which of them a take gives: the rules that keep the bound of staleness.

A group is *due* at the last take that may give it. Weights change at most once between two takes, so what is admitted
while take k waits, or after it, is at most j - k versions old at take j:

    due  =  k + max_staleness

With n groups to a take, the groups due up to take j must fit into the takes up to j. That holds for all j, for

- a group is admitted only while those kept or playing are fewer than n x (depth + 1 while a take waits), with a depth
  of at most max_staleness: at their admission all fit, and they are due no earlier than those before them;
- take k gives of the groups due up to j all but the n x (j - k) that later takes have room for: it waits for them.

Nothing is thrown away for age, and no group starves. What is left open is which groups go first:

    admission     depth = max_staleness. The oldest first; there is no other choice, for no take has room to spare.
    completion    depth = half of it, rounded up. Those that are through first; the other half of the bound is what
                  a slow group may be overtaken by before it is waited for.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from attrs import define, field, frozen

from whet.data.records import Group

Order = Literal["fifo", "as_completed"]


@define(eq=False)
class Slot:
    """One admitted group."""

    index: int
    """Order of admission, counted from 0 over the whole run."""
    route: int
    task: int
    due: int
    """The last take that may give it; takes are counted from 1 in this sitting."""
    outcome: Literal["playing", "kept", "filtered", "dropped"] = "playing"
    group: Group | None = None
    """When kept."""
    finished: int = 0
    """Which of all groups it was to be through; 0 while it plays."""
    tally: Counter[str] = field(factory=Counter)
    """Its episodes by how they ended."""

    @property
    def counts(self) -> bool:
        """Whether it is, or may become, one of the groups that a take gives."""
        return self.outcome in ("playing", "kept")


@frozen
class Pacing:
    """The rules for one bound and one order."""

    max_staleness: int
    order: Order = "fifo"

    @property
    def depth(self) -> int:
        """Takes that are prepared beyond the one that is waited for."""
        return self.max_staleness if self.order == "fifo" else (self.max_staleness + 1) // 2

    def due(self, takes: int, taking: bool) -> int:
        """Give the last take for a group admitted now, after so many takes and perhaps while another waits."""
        return takes + taking + self.max_staleness

    def room(self, slots: Sequence[Slot], size: int, taking: bool) -> int:
        """Say how many groups may be admitted now, with takes of `size` groups."""
        return max(0, size * (self.depth + taking) - sum(slot.counts for slot in slots))

    def choose(self, slots: Sequence[Slot], size: int, take: int) -> list[Slot] | None:
        """Choose what a take gives, in order of admission; None while groups that it must give still play.

        `slots` are all groups that were admitted and not given, in order of admission.
        """
        counting = [slot for slot in slots if slot.counts]
        if self.order == "fifo":
            chosen = counting[:size]
            return chosen if len(chosen) == size and all(slot.outcome == "kept" for slot in chosen) else None
        through = sorted((slot for slot in counting if slot.outcome == "kept"), key=lambda slot: slot.finished)
        first: list[Slot] = []
        for ahead in range(self.max_staleness):  # beyond, there is room for all that may be admitted
            latest = take + ahead
            wanted = sum(slot.due <= latest for slot in counting) - size * ahead - len(first)
            urgent = [slot for slot in through if slot.due <= latest and slot not in first]
            if len(urgent) < wanted:
                return None
            first += urgent[: max(0, wanted)]
        first += [slot for slot in through if slot not in first][: size - len(first)]
        return sorted(first, key=lambda slot: slot.index) if len(first) == size else None
