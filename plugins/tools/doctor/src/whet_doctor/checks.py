"""Findings, and how they are made: several checks at one time, each under the deadline of all."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from attrs import frozen

from whet.errors import in_words

Status = Literal["ok", "warn", "fail"]


@frozen
class Check:
    """One finding."""

    name: str
    status: Status
    """`warn`: a run may suffer. `fail`: it will not work."""
    found: str
    change: str = ""
    """The change that makes the check pass."""


Checker = Callable[[], Iterator[Check]]


def within(seconds: float, checkers: Mapping[str, Checker]) -> list[Check]:
    """Make checks at one time, each in a thread of its own, which is left behind where it does not answer."""
    deadline = time.monotonic() + seconds
    threads = []
    for name, checker in checkers.items():
        found: list[Check] = []
        thread = threading.Thread(target=_make, args=(name, checker, found), name=f"whet-doctor-{name}", daemon=True)
        thread.start()
        threads.append((name, thread, found))
    made = []
    for name, thread, found in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        late = Check(name, "fail", f"no answer within {seconds:g} s", "look for a file system or driver that hangs")
        made += [late] if thread.is_alive() else found
    return made


def _make(name: str, checker: Checker, found: list[Check]) -> None:
    try:
        found.extend(checker())
    except Exception as error:  # a check that cannot be made is a finding like any other
        found.append(Check(name, "fail", in_words(error)))
