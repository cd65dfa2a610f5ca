"""Rows of episodes for the run folder. A distribution may offer a recorder that adds tokens to some of them."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from whet.data.batch import Batch
from whet.data.records import Group
from whet.rollout.collate import record

Rows = list[dict[str, Any]]


class Recorder(Protocol):
    """Makes the rows of all episodes. An entry point in the group `whet.recorders` makes one."""

    def taken(self, step: int, batch: Batch) -> None:
        """Look at a batch before it is trained on. A step may take several."""

    def rows(self, groups: Sequence[Group], finished: Batch) -> Callable[[], Rows]:
        """Return a function that returns a row for each episode. Any thread may call it.

        `finished` is the batch with the columns that the algorithm added.
        """


class MessageRecorder:
    """Records messages and rewards alone. Obeys `Recorder`."""

    def taken(self, step: int, batch: Batch) -> None:
        """Do nothing."""

    def rows(self, groups: Sequence[Group], finished: Batch) -> Callable[[], Rows]:
        """See `Recorder.rows`."""
        return lambda: [row for group in groups for row in record(group)]
