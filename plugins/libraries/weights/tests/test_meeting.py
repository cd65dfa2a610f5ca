"""A late receiver reads a staged copy: strangers, a sender that dies, bytes that are written over."""

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import attrs
import pytest
import torch

from whet.errors import WeightSyncError
from whet.interfaces.weights import TransferSpec
from whet_weights.exchange import Exchange
from whet_weights.transfer import receive, send


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exchange]:
    """Senders wait for no receiver, so every receiver is late."""
    monkeypatch.setattr("whet_weights.bucket_stream.GATHER_SECONDS", 0.0)
    made = Exchange("127.0.0.1")
    yield made
    made.close()


def make_spec(exchange: Exchange, version: int = 1) -> TransferSpec:
    return TransferSpec(
        "broadcast", exchange.address, uuid.uuid4().hex, version, timeout_seconds=20.0, token=exchange.token
    )


def large(value: float) -> list[tuple[str, torch.Tensor]]:
    """More than the kernel buffers between two ends."""
    return [(f"large.{n}", torch.full((8_000_000,), value + n)) for n in range(4)]


def test_a_session_begun_while_another_is_read_is_refused(exchange: Exchange) -> None:
    spec = make_spec(exchange)
    send(spec, large(0.0))
    reading = receive(spec)
    next(reading)
    send(make_spec(exchange, 2), large(100.0))
    with pytest.raises(WeightSyncError, match=r"another session"):
        list(reading)


@pytest.mark.parametrize("end", [send, receive])
def test_who_does_not_know_the_token_takes_no_part(exchange: Exchange, end: object) -> None:
    spec = attrs.evolve(make_spec(exchange), token="00" * 32)
    with pytest.raises(WeightSyncError, match="does not know the run's token"):
        list(receive(spec)) if end is receive else send(spec, [])


def test_a_sender_that_dies_ends_the_wait_of_the_receiver(exchange: Exchange) -> None:
    spec = make_spec(exchange)
    program = (
        "import sys, torch; from whet_weights import bucket_stream; bucket_stream.GATHER_SECONDS = 0.0\n"
        "from whet_weights.transfer import send; from whet.interfaces.weights import TransferSpec\n"
        "spec = TransferSpec('broadcast', sys.argv[1], sys.argv[2], 1, timeout_seconds=20.0, token=sys.argv[3])\n"
        "send(spec, [(f'large.{n}', torch.zeros(8_000_000)) for n in range(4)])\n"
        "print('sent', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, spec.address, spec.session, spec.token]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"sent\n"
        reading = receive(spec)
        assert next(reading)[1].numel() == 8_000_000
        sender.kill()
        with pytest.raises(WeightSyncError, match="ended half way"):
            list(reading)


def test_the_token_is_not_shown(exchange: Exchange) -> None:
    assert exchange.token not in repr(make_spec(exchange))


def test_a_sender_may_take_longer_over_its_weights_than_the_exchange_waits_for_a_message(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet_weights.exchange._MESSAGE_SECONDS", 0.2)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        time.sleep(0.8)
        yield "weight", torch.ones(3)

    spec = make_spec(exchange)
    send(spec, gathered())
    assert [(name, tensor.tolist()) for name, tensor in receive(spec)] == [("weight", [1.0, 1.0, 1.0])]
