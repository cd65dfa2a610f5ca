"""Receivers by `tcp` that are told where the senders are do not ask the driver."""

import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import attrs
import pytest
import torch

from whet.errors import WeightSyncError
from whet.interfaces.weights import Places, TransferSpec
from whet.runtime.wire import decode, encode
from whet.weights import staged_copy
from whet.weights.exchange import Exchange
from whet.weights.transfer import receive, send


class Noted(Exchange):
    """Notes who comes."""

    def __init__(self) -> None:
        self.came: list[str] = []
        super().__init__("127.0.0.1")

    def _take(self, name: str, guest: Any) -> None:
        self.came.append(name.split("/")[0])
        super()._take(name, guest)


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    monkeypatch.setattr(staged_copy, "_copies", {})
    made = Noted()
    yield made
    made.close()


def make_spec(exchange: Exchange, version: int, places: Places = (), **options: Any) -> TransferSpec:
    usual = {"timeout_seconds": 20.0, "token": exchange.token, "places": places, **options}
    return TransferSpec("tcp", exchange.address, uuid.uuid4().hex, version, **usual)


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"layer.{n}", torch.full((5, 7), float(100 * version + n))) for n in range(4)]


def begin(pool: ThreadPoolExecutor, spec: TransferSpec) -> list["Future[dict[str, float]]"]:
    """Let two receivers come."""

    def taken(receiver: int) -> dict[str, float]:
        return {name: float(tensor.mean()) for name, tensor in receive(spec, receiver)}

    return [pool.submit(taken, receiver) for receiver in range(2)]


@pytest.fixture
def early(exchange: Noted) -> Iterator[tuple[TransferSpec, list["Future[dict[str, float]]"]]]:
    """Of version 2: its spec, and receivers that came before its sender has begun."""
    send(make_spec(exchange, 1), weights(1))
    spec = make_spec(exchange, 2, exchange.places())
    with ThreadPoolExecutor() as pool:
        receivers = begin(pool, spec)
        time.sleep(0.3)
        assert not any(receiver.done() for receiver in receivers)
        yield spec, receivers


def check(receivers: list["Future[dict[str, float]]"], version: int) -> None:
    for receiver in receivers:
        assert receiver.result(30) == {name: float(tensor.mean()) for name, tensor in weights(version)}


def move(sender: int) -> None:
    """Let a sender be elsewhere from now on, as after a restart of its process."""
    (key,) = (key for key in staged_copy._copies if key[1] == sender)
    staged_copy._copies.pop(key).door.close()


def test_they_come_to_the_exchange_at_the_first_weight_sync_alone(exchange: Noted) -> None:
    assert exchange.places() == ()
    with ThreadPoolExecutor() as pool:
        for version in (1, 2, 3):
            spec = make_spec(exchange, version, exchange.places())
            assert len(spec.places) == (version > 1)
            receivers = begin(pool, spec)
            send(spec, weights(version))
            check(receivers, version)
    assert sorted(exchange.came) == ["receiver", "receiver", "sender", "sender", "sender"]


def test_who_comes_before_the_sender_has_begun_waits_for_it(exchange: Noted, early: Any) -> None:
    spec, receivers = early
    send(spec, weights(2))
    check(receivers, 2)
    assert exchange.came == ["sender", "sender"]


def test_who_waits_for_a_session_that_is_passed_over_is_refused_at_once(exchange: Noted, early: Any) -> None:
    _, receivers = early
    later, begun = make_spec(exchange, 3), time.monotonic()
    send(later, weights(3))
    for receiver in receivers:
        with pytest.raises(WeightSyncError, match=f"sender 0 refused it: it holds session {later.session}"):
            receiver.result(10)
    assert time.monotonic() - begun < 5.0


def test_who_waits_for_a_sender_that_never_begins_is_told_what_that_holds(exchange: Noted) -> None:
    before = make_spec(exchange, 1, timeout_seconds=1.0)
    send(before, weights(1))
    spec = make_spec(exchange, 2, exchange.places(), timeout_seconds=1.0)
    with pytest.raises(WeightSyncError, match=f"sender 0 refused it: it holds session {before.session}"):
        list(receive(spec))


def test_a_session_that_is_over_is_refused_at_once(exchange: Noted) -> None:
    old = make_spec(exchange, 1)
    send(old, weights(1))
    send(make_spec(exchange, 2), weights(2))
    with pytest.raises(WeightSyncError, match="sender 0 refused it: it holds session"):
        list(receive(attrs.evolve(old, places=exchange.places())))


@pytest.mark.parametrize("moved", [0, 1])
def test_senders_that_are_elsewhere_are_asked_for_at_the_exchange(exchange: Noted, moved: int) -> None:
    def sync(spec: TransferSpec, version: int) -> None:
        with ThreadPoolExecutor() as pool:
            receivers = begin(pool, spec)
            parts = enumerate([weights(version)[:2], weights(version)[2:]])
            for sent in [pool.submit(send, spec, part, n) for n, part in parts]:
                sent.result(30)
            check(receivers, version)

    sync(make_spec(exchange, 1, senders=2), 1)
    places = exchange.places()
    assert [place["sender"] for place in places] == [0, 1]
    sync(make_spec(exchange, 2, places, senders=2), 2)
    assert exchange.came.count("receiver") == 2
    move(moved)
    sync(make_spec(exchange, 3, places, senders=2), 3)
    assert exchange.came.count("receiver") == 4
    sync(make_spec(exchange, 4, places[:1], senders=2), 4)  # not all are known
    assert exchange.came.count("receiver") == 6


def test_a_link_with_places_crosses(exchange: Noted) -> None:
    send(make_spec(exchange, 1), weights(1))
    spec = make_spec(exchange, 2, exchange.places())
    assert hash(spec) == hash(decode(encode(spec)))
    for crossed in (decode(encode(spec)), TransferSpec(**json.loads(json.dumps(attrs.asdict(spec))))):
        send(spec, weights(2))
        assert [name for name, _ in receive(crossed)] == [name for name, _ in weights(2)]
    assert "receiver" not in exchange.came
