"""Worker processes that tests share: starting one, with its imports, takes seconds."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from whet.runtime.local import LocalCluster
from whet_testing.scripted_worker import TARGET


def holder_of(role: str) -> str:
    """Return the role whose worker keeps the processes of a role: without any worker they end."""
    return f"{role}-holder"


def hold(cluster: LocalCluster, roles: Sequence[str], ranks: int, imports: Sequence[str], forkable: bool) -> None:
    """Start the processes that roles share with `holder_of` the first, as a run does, and keep them."""
    every = [*roles, holder_of(roles[0])]
    for role in every:
        cluster.worker_group(role, ranks)
    cluster.warm(dict.fromkeys(every, imports), every if forkable else ())
    cluster.worker_group(every[-1], ranks).spawn(TARGET, {})


@contextmanager
def held_processes(logs: Path, groups: Mapping[tuple[str, ...], int], imports: Sequence[str]) -> Iterator[LocalCluster]:
    """Yield a cluster whose processes are started as in a run, and stay from test to test.

    `groups`: roles that share processes, and the number of the processes. `imports`: modules that all of them import,
    once, before they are forked. A closed worker must leave nothing in its process that could change the next test.
    """
    with LocalCluster(logs, share=[(*roles, holder_of(roles[0])) for roles in groups]) as cluster:
        for roles, ranks in groups.items():
            hold(cluster, roles, ranks, imports, forkable=True)
        yield cluster
