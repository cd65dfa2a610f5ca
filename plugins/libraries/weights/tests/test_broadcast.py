"""What goes along a stream: all receivers at once, a bucket at a time, and what becomes of it when one is gone."""

import logging
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import attrs
import pytest
import torch

from whet.errors import WeightSyncError
from whet.interfaces.weights import TransferSpec
from whet_weights import broadcast, bucket_stream
from whet_weights.bucket_stream import tell, told
from whet_weights.exchange import Exchange
from whet_weights.meeting import address, connect, offers
from whet_weights.transfer import receive, send

Weights = list[tuple[str, torch.Tensor]]


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exchange]:
    monkeypatch.setattr(bucket_stream, "BUCKET_BYTES", 1000)
    made = Exchange("127.0.0.1")
    yield made
    made.close()


def make_spec(exchange: Exchange, version: int = 1, **options: object) -> TransferSpec:
    usual = {"timeout_seconds": 20.0, "token": exchange.token, "receivers": 2, **options}
    return TransferSpec("broadcast", exchange.address, uuid.uuid4().hex, version, **usual)  # type: ignore[arg-type]


def make_weights(seed: int = 0, count: int = 12) -> Weights:
    draw = torch.Generator().manual_seed(seed)
    kinds = (torch.float32, torch.bfloat16)
    return [(f"layer.{n}", torch.randn(n + 1, 37, generator=draw).to(kinds[n % 2])) for n in range(count)]


def sync(spec: TransferSpec, *parts: Weights) -> list[dict[str, torch.Tensor]]:
    """All senders and receivers at once -> what each receiver took."""

    def taken(receiver: int) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in receive(spec, receiver)}

    with ThreadPoolExecutor() as pool:
        found = [pool.submit(taken, receiver) for receiver in range(spec.receivers)]
        for sent in [pool.submit(send, spec, part, n) for n, part in enumerate(parts)]:
            sent.result(30)
        return [future.result(30) for future in found]


def assert_same(found: dict[str, torch.Tensor], sent: Weights) -> None:
    assert list(found) == [name for name, _ in sent]
    assert all(torch.equal(found[name], tensor) for name, tensor in sent)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "whet_weights.bucket_stream")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "whet_weights.bucket_stream"]


def test_all_receivers_take_every_bucket_and_groups_are_kept(
    exchange: Exchange, warnings: Callable[[], list[str]]
) -> None:
    names = set()
    for version in (1, 2, 3):
        for found in sync(make_spec(exchange, version), make_weights(version)):
            assert_same(found, make_weights(version))
        names |= {group.name for key, group in broadcast._groups.items() if key[1] == exchange.address}
    assert len(names) == 1
    assert warnings() == []


def test_a_receiver_that_is_gone_before_it_joins_holds_nobody_up(
    exchange: Exchange, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, sent = make_spec(exchange, timeout_seconds=200.0), make_weights()
    joining = list[object]()
    monkeypatch.setattr(broadcast, "_join", lambda *about: joining.append(about))

    def leaves() -> None:
        (offer,) = offers(spec, 0, time.monotonic() + 30)
        with closing(connect(spec, address(offer), f"stream/{spec.session}/0")) as connection:
            tell(connection, {"held": ""})
            assert "meet" in told(connection, time.monotonic() + 30)

    with ThreadPoolExecutor() as pool:
        gone = pool.submit(leaves)
        stays = pool.submit(lambda: {name: tensor.clone() for name, tensor in receive(spec, 1)})
        pool.submit(send, spec, sent, 0).result(60)
        gone.result(60)
        assert_same(stays.result(60), sent)
    assert "gone that was to take part" in warnings()[0]
    assert not joining, "who joins cannot be stopped, by NCCL least of all"


def test_senders_are_heard_one_after_another(exchange: Exchange, warnings: Callable[[], list[str]]) -> None:
    weights = make_weights()
    for found in sync(make_spec(exchange, senders=2), weights[:5], weights[5:]):
        assert_same(found, weights)
    assert warnings() == []


def test_the_group_is_made_anew_for_other_receivers(exchange: Exchange, warnings: Callable[[], list[str]]) -> None:
    for version, receivers in enumerate((2, 3, 1), start=1):
        for found in sync(make_spec(exchange, version, receivers=receivers), make_weights(version)):
            assert_same(found, make_weights(version))
    assert warnings() == []


def test_tensors_are_cast_before_they_leave(exchange: Exchange) -> None:
    for found in sync(make_spec(exchange, dtype="bfloat16"), make_weights()):
        assert_same(found, [(name, tensor.bfloat16()) for name, tensor in make_weights()])


def test_who_comes_too_late_takes_the_copy(
    exchange: Exchange, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_stream, "GATHER_SECONDS", 0.5)
    spec = make_spec(exchange)
    (alone,) = sync(attrs.evolve(spec, receivers=1), make_weights())
    late = {name: tensor.clone() for name, tensor in receive(spec, 1)}
    assert_same(alone, make_weights())
    assert_same(late, make_weights())
    assert len([words for words in warnings() if "too late" in words]) == 1


def test_where_no_copy_is_kept_who_comes_too_late_is_told_why(exchange: Exchange) -> None:
    spec = make_spec(exchange, receivers=1, kept=False)
    sync(spec, make_weights())
    with pytest.raises(WeightSyncError, match=r"keeps no copy .*cluster\.recovery"):
        list(receive(spec, 1))


def test_a_sender_that_fails_half_way_is_quoted_at_once(exchange: Exchange) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from make_weights(count=6)
        raise MemoryError("no room for the next")

    spec = make_spec(exchange, receivers=1, timeout_seconds=60.0)
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(send, spec, failing())
        begin = time.monotonic()
        with pytest.raises(WeightSyncError, match="gave up: MemoryError: no room for the next"):
            list(receive(spec))
        assert time.monotonic() - begin < 30
        assert isinstance(sent.exception(30), MemoryError)


def test_a_flipped_bit_is_found(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    take = broadcast._Receiving.take

    def flipped(self: broadcast._Receiving, *args: object) -> torch.Tensor:
        data = take(self, *args)  # type: ignore[arg-type]
        data[3] ^= 1
        return data

    monkeypatch.setattr(broadcast._Receiving, "take", flipped)
    with pytest.raises(WeightSyncError, match=r"layer\.0 is damaged: checksum"):
        sync(make_spec(exchange, receivers=1), make_weights())


RECEIVER = """
import sys
from whet_weights.transfer import receive
from whet.interfaces.weights import TransferSpec
spec = TransferSpec("broadcast", sys.argv[1], sys.argv[2], 1, timeout_seconds=20.0, token=sys.argv[3], receivers=2)
for number, (name, tensor) in enumerate(receive(spec, 1)):
    if number == 2:
        print("two", flush=True)
        sys.stdin.read()
"""


def test_a_receiver_that_dies_half_way_takes_nobody_along(
    exchange: Exchange, warnings: Callable[[], list[str]]
) -> None:
    spec = make_spec(exchange)
    command = [sys.executable, "-c", RECEIVER, spec.address, spec.session, spec.token]
    died = threading.Event()

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(make_weights()):
            if number == 6:
                assert died.wait(30)
            yield item

    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
        ThreadPoolExecutor() as pool,
    ):
        sent = pool.submit(send, spec, slowly())
        found = pool.submit(lambda: {name: tensor.clone() for name, tensor in receive(spec, 0)})
        assert other.stdout is not None
        assert other.stdout.readline() == b"two\n"
        other.kill()
        other.wait()
        died.set()
        sent.result(30)
        assert_same(found.result(30), make_weights())
    assert warnings()
    for again in sync(make_spec(exchange, 2), make_weights(2)):
        assert_same(again, make_weights(2))


LEAVING = """
import sys, threading, torch
from whet.errors import WeightSyncError
from whet_weights import broadcast
from whet_weights.bucket_stream import tell, told
from whet_weights.exchange import Exchange
from whet_weights.meeting import address, connect, offers
from whet_weights.transfer import receive, send
from whet.interfaces.weights import TransferSpec
exchange = Exchange("127.0.0.1")
spec = TransferSpec("broadcast", exchange.address, "ab", 1, timeout_seconds=60.0, token=exchange.token, receivers=1)
sending = threading.Thread(target=send, args=(spec, [("a", torch.ones(9))]))
sending.start()
broadcast._Receiving.take = lambda self, *about: 1 / 0
try:
    list(receive(spec))
except ZeroDivisionError:
    sending.join()
    print("left in the middle")
"""


def test_a_process_with_a_broken_broadcast_ends_in_order() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=40, check=False)
    assert (done.returncode, done.stdout) == (0, "left in the middle\n"), done.stderr
