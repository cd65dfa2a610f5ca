"""Sessions of one process that follow each other or overlap. In a module of its own, since each starts and ends Ray."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("ray")

from whet.cluster import ray_session
from whet.cluster.ray_session import RaySession
from whet.errors import ConfigError


@pytest.fixture
def opened() -> Iterator[list[RaySession]]:
    sessions: list[RaySession] = []
    yield sessions
    for session in sessions:
        session.close()


def test_ray_ends_with_the_last_session_that_uses_it(opened: list[RaySession]) -> None:
    import ray

    first, second = RaySession(), RaySession()
    opened += first, second
    for session in opened:
        session.wait(120.0)
        assert session.local
        assert not session.ends_ray
    with pytest.raises(ConfigError, match="this process uses Ray at 'this machine' already"):
        RaySession("127.0.0.1:6379")
    first.close()
    first.close()
    assert second.nodes
    assert second.ends_ray
    second.close()
    assert not ray.is_initialized()


def test_a_session_waits_for_the_end_of_the_ray_before(
    opened: list[RaySession], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RaySession()
    opened.append(first)
    first.wait(120.0)
    before = first.nodes[0].id
    monkeypatch.setattr(ray_session, "_END_SECONDS", 0.0)  # nobody waits until it has ended
    first.close()
    second = RaySession()
    opened.append(second)
    second.wait(120.0)
    monkeypatch.undo()
    time.sleep(2.0)
    assert [node.id != before for node in second.nodes] == [True]
    assert second.ends_ray


def test_what_sigterm_does_is_left_to_this_process(opened: list[RaySession]) -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        session = RaySession()
        opened.append(session)
        session.wait(120.0)
        os.kill(os.getpid(), signal.SIGTERM)
        session.close()
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [signal.SIGTERM, signal.SIGTERM]
