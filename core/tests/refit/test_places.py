"""Receivers that are told where the senders are do not ask the driver."""

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import attrs
import pytest
import torch

from whet.refit import kept
from whet.refit.exchange import Exchange
from whet.refit.handover import receive, send
from whet.refit.link import Link, Places

TRANSPORTS = ("tcp", "broadcast")


class Noted(Exchange):
    """Notes who comes."""

    def __init__(self) -> None:
        self.came: list[str] = []
        super().__init__("127.0.0.1")

    def _take(self, name: str, guest: Any) -> None:
        self.came.append(name.split("/")[0])
        super()._take(name, guest)


@pytest.fixture
def exchange() -> Iterator[Noted]:
    made = Noted()
    yield made
    made.close()


def make_link(exchange: Exchange, transport: str, version: int, places: Places, **options: Any) -> Link:
    usual = {"timeout_seconds": 20.0, "token": exchange.token, "receivers": 2, "places": places, **options}
    return Link(transport, exchange.address, uuid.uuid4().hex, version, **usual)


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"layer.{n}", torch.full((5, 7), float(100 * version + n))) for n in range(4)]


def begin(pool: ThreadPoolExecutor, link: Link) -> list["Future[dict[str, float]]"]:
    """Let all receivers come."""

    def taken(receiver: int) -> dict[str, float]:
        return {name: float(tensor.mean()) for name, tensor in receive(link, receiver)}

    return [pool.submit(taken, receiver) for receiver in range(link.receivers)]


def check(receivers: list["Future[dict[str, float]]"], version: int) -> None:
    for receiver in receivers:
        assert receiver.result(30) == {name: float(tensor.mean()) for name, tensor in weights(version)}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_they_come_to_the_exchange_at_the_first_hand_over_alone(exchange: Noted, transport: str) -> None:
    assert exchange.places() == ()
    with ThreadPoolExecutor() as pool:
        for version in (1, 2, 3):
            link = make_link(exchange, transport, version, exchange.places())
            receivers = begin(pool, link)
            send(link, weights(version))
            check(receivers, version)
    assert sorted(exchange.came) == ["receiver", "receiver", "sender", "sender", "sender"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_senders_are_all_known_or_none_is(exchange: Noted, transport: str) -> None:
    parts = [weights(1)[:2], weights(1)[2:]]
    with ThreadPoolExecutor() as pool:
        for places in ((), exchange.places):
            link = make_link(exchange, transport, 1, places() if callable(places) else places, senders=2)
            receivers = begin(pool, link)
            sent = [pool.submit(send, link, part, n) for n, part in enumerate(parts)]
            check(receivers, 1)
            assert [future.result(30) for future in sent] == [None, None]
        assert exchange.came.count("receiver") == 2
        link = attrs.evolve(link, session="another", places=link.places[:1])
        receivers = begin(pool, link)
        for n, part in enumerate(parts):
            pool.submit(send, link, part, n)
        check(receivers, 1)
        assert exchange.came.count("receiver") == 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_comes_before_the_sender_has_begun_waits_for_it(exchange: Noted, transport: str) -> None:
    send(make_link(exchange, transport, 1, (), receivers=0), weights(1))
    link = make_link(exchange, transport, 2, exchange.places())
    with ThreadPoolExecutor() as pool:
        receivers = begin(pool, link)
        time.sleep(0.3)
        assert not any(receiver.done() for receiver in receivers)
        send(link, weights(2))
        check(receivers, 2)
    assert exchange.came == ["sender", "sender"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sender_that_is_elsewhere_is_asked_for_at_the_exchange(
    exchange: Noted, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of its process."""
    send(make_link(exchange, transport, 1, (), receivers=0), weights(1))
    places = exchange.places()
    (copy,) = (copy for copy in kept._copies.values() if copy.token == exchange.token)
    copy.door.close()
    monkeypatch.setattr(kept, "_copies", {})
    link = make_link(exchange, transport, 2, places)
    with ThreadPoolExecutor() as pool:
        receivers = begin(pool, link)
        time.sleep(0.2)
        send(link, weights(2))
        check(receivers, 2)
    assert exchange.came.count("receiver") == 2
    assert exchange.places() != places
