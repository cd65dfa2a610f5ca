"""When groups are admitted, and which groups a take returns: the rules that keep the bound of staleness.

A group is *due* at the last take that may return it. Weights change at most once between two takes, so a group admitted
while take k waits, or after it, is at most j - k versions old at take j:

    due  =  k + max_staleness

With n groups per take, the groups due up to take j must fit into the takes up to j. That holds for all j, because

- a group is admitted only while fewer than n x (depth + 1 while a take waits) groups are kept or playing, with a depth
  of at most max_staleness: at admission all of them fit, and a new group is due no earlier than those before it;
- take k returns all groups due up to j, except the n x (j - k) for which later takes have room. It waits for them.

No group is discarded because of its age, and none starves. The order decides which groups go first:

    fifo          depth = max_staleness. The oldest first; there is no other choice, for no take has room to spare.
    as_completed  depth = half of max_staleness, rounded up. The first to finish go first; the other half of the bound
                  is how far a slow group may be overtaken before a take waits for it.
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
    """The last take that may return it. Takes are counted from 1 in each attempt of the run."""
    outcome: Literal["playing", "kept", "filtered", "dropped"] = "playing"
    group: Group | None = None
    """The finished group, if it was kept or filtered."""
    finished: int = 0
    """Its place in the order in which groups finished; 0 while it plays."""
    tally: Counter[str] = field(factory=Counter)
    """Its episodes by outcome."""
    step: int = 0
    """Number of finished steps at its admission."""
    difficulty: float | None = None
    """Difficulty of its episodes, if its environment has one."""

    @property
    def counts(self) -> bool:
        """Return whether the group is, or may become, one that a take returns."""
        return self.outcome in ("playing", "kept")


@frozen
class Pacing:
    """The rules for one bound and one order."""

    max_staleness: int
    order: Order = "fifo"

    @property
    def depth(self) -> int:
        """Return how many takes are prepared beyond the one that is waiting."""
        return self.max_staleness if self.order == "fifo" else (self.max_staleness + 1) // 2

    def due(self, takes: int, taking: bool) -> int:
        """Return the last take for a group admitted now, after `takes` takes and perhaps while another one waits."""
        return takes + taking + self.max_staleness

    def room(self, slots: Sequence[Slot], size: int, taking: bool) -> int:
        """Return how many groups may be admitted now, with takes of `size` groups."""
        return max(0, size * (self.depth + taking) - sum(slot.counts for slot in slots))

    def choose(self, slots: Sequence[Slot], size: int, take: int) -> list[Slot] | None:
        """Return the groups of a take, in order of admission. None: a group that it must return is still playing.

        `slots` are all groups that were admitted and not returned yet, in order of admission.
        """
        counting = [slot for slot in slots if slot.counts]
        if self.order == "fifo":
            chosen = counting[:size]
            return chosen if len(chosen) == size and all(slot.outcome == "kept" for slot in chosen) else None
        through = sorted((slot for slot in counting if slot.outcome == "kept"), key=lambda slot: slot.finished)
        first: list[Slot] = []
        for ahead in range(self.max_staleness):  # beyond it there is room for all groups that may be admitted
            latest = take + ahead
            wanted = sum(slot.due <= latest for slot in counting) - size * ahead - len(first)
            urgent = [slot for slot in through if slot.due <= latest and slot not in first]
            if len(urgent) < wanted:
                return None
            first += urgent[: max(0, wanted)]
        first += [slot for slot in through if slot not in first][: size - len(first)]
        return sorted(first, key=lambda slot: slot.index) if len(first) == size else None
