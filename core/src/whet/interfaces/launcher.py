"""What core asks of a launcher: where a run's processes are, whether it can start them, and the cluster itself.

A launcher is a value of `cluster.launcher`. A distribution offers one by an entry point, so that a plan knows its name
without an import, and every function of a plan can ask for it by the config alone:

    [project.entry-points."whet.launchers"]
    far = "its_package.launcher:ItsLaunching"
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from whet.config.sections import ClusterSection


class Finding(NamedTuple):
    """One thing that a launcher has found out about this machine or its cluster."""

    status: Literal["ok", "warn", "fail"]
    found: str
    change: str = ""
    """What to do about it."""


class Launching(Protocol):
    """A launcher, before it has started anything. It is made without arguments, and its import is light."""

    def address(self, section: "ClusterSection") -> str:
        """Return the address of the cluster that a run joins. Empty: its processes are on this machine."""

    def examine(self, section: "ClusterSection | None") -> Iterator[Finding]:
        """Yield the findings for a report on this machine. None: no config was given, or it names another launcher."""

    def cluster(
        self, section: "ClusterSection", run: str, logs: Path, share: Sequence[Sequence[str]], python: Mapping[str, str]
    ) -> Any:
        """Return a `whet.runtime.launcher.Cluster`. What takes time begins in the background.

        `run` is the name of the run, `share` has the groups of roles that share processes, and `python` the path of
        the interpreter of each role that does not run in the driver's.
        """
