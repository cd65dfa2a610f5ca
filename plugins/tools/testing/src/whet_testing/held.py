"""Worker processes that tests share: starting one, with its imports, takes seconds."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from whet.runtime.local import LocalCluster
from whet_testing.scripted_worker import TARGET


@contextmanager
def held_processes(logs: Path, groups: Mapping[tuple[str, ...], int], imports: Sequence[str]) -> Iterator[LocalCluster]:
    """Start processes as a run does, and keep them from test to test.

    `groups`: roles that share processes, and the number of the processes. `imports`: modules that all of them import,
    once, before they are forked. A closed worker must leave nothing in its process that could change the next test.
    """
    held = {roles: f"{roles[0]}-holder" for roles in groups}  # a process ends when no role has a worker in it
    share = [(*roles, holder) for roles, holder in held.items()]
    cluster = LocalCluster(logs, share=share)
    with cluster:
        for roles, holder in held.items():
            for role in (*roles, holder):
                cluster.worker_group(role, groups[roles])
        every = [role for group in share for role in group]
        cluster.warm(dict.fromkeys(every, imports), every)
        for roles, holder in held.items():
            cluster.worker_group(holder, groups[roles]).spawn(TARGET, {})
        yield cluster
