"""Every transport gives what was sent, and refuses whatever is not all of it."""

import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch

from whet.errors import ConfigError, WeightSyncError
from whet.interfaces.weights import STREAMED, TransferSpec
from whet.plan.placement import choose_transport
from whet_weights import bucket_stream
from whet_weights.exchange import Exchange
from whet_weights.transfer import receive, send

TRANSPORTS = ("shared", "broadcast", "shared-memory", "disk")
BY_BYTES = ("broadcast", "shared-memory", "disk")
BY_FILE = ("shared-memory", "disk")


@pytest.fixture(autouse=True)
def exchange(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bucket_stream, "GATHER_SECONDS", 0.05)  # senders are not to wait here for who comes after them
    EXCHANGES.append(Exchange("127.0.0.1"))
    yield
    EXCHANGES.pop().close()


EXCHANGES: list[Exchange] = []


def make_spec(transport: str, folder: Path, version: int = 1, **options: object) -> TransferSpec:
    if transport in STREAMED:
        folder, options = EXCHANGES[0].address, {"token": EXCHANGES[0].token, **options}
    return TransferSpec(transport, str(folder), uuid.uuid4().hex, version, **{"timeout_seconds": 5.0, **options})


def make_weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        ("embed.weight", torch.randn(33, 7, generator=draw)),
        ("norm.weight", torch.randn(7, generator=draw).bfloat16()),
        ("sliced.weight", torch.randn(50, 50, generator=draw)[3:20, ::2]),
        ("large.weight", torch.randn(300, 301, generator=draw)),
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.empty(0, 4)),
    ]


def sent_file(spec: TransferSpec) -> Path:
    """Return the file in which a sender's tensors are."""
    name = json.loads((Path(spec.address) / "manifest-0.json").read_text())["entries"][0]["file"]
    _, process, descriptor = f"{name}--".split("-")[:3]
    return Path(f"/proc/{process}/fd/{descriptor}") if name.startswith("memory-") else Path(spec.address) / name


def taken(spec: TransferSpec) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in receive(spec)}


def assert_equal(found: dict[str, torch.Tensor], sent: list[tuple[str, torch.Tensor]]) -> None:
    assert list(found) == [name for name, _ in sent]
    for name, tensor in sent:
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("transport", BY_BYTES)
def test_a_receiver_that_comes_late_gets_what_the_last_session_left(tmp_path: Path, transport: str) -> None:
    spec, sent = make_spec(transport, tmp_path), make_weights()
    send(spec, sent)
    for _ in range(2):
        assert_equal(taken(spec), sent)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_everything_sent_arrives_bit_for_bit(transport: str, tmp_path: Path) -> None:
    spec = make_spec(transport, tmp_path / "new")
    send(spec, make_weights())
    assert_equal(taken(spec), make_weights())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_second_session_gives_the_new_weights(transport: str, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        spec = make_spec(transport, tmp_path, version)
        send(spec, make_weights(version))
        assert_equal(taken(spec), make_weights(version))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_receiver_may_come_first(transport: str, tmp_path: Path) -> None:
    spec = make_spec(transport, tmp_path)
    found: dict[str, torch.Tensor] = {}
    receiver = threading.Thread(target=lambda: found.update(taken(spec)))
    receiver.start()
    send(spec, make_weights())
    receiver.join(10)
    assert_equal(found, make_weights())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_senders_make_one_weight_sync(transport: str, tmp_path: Path) -> None:
    spec, weights = make_spec(transport, tmp_path, senders=2), make_weights()
    send(spec, weights[3:], sender=1)
    send(spec, weights[:3], sender=0)
    assert_equal(taken(spec), weights)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_receivers_take_the_same(transport: str, tmp_path: Path) -> None:
    spec = make_spec(transport, tmp_path, receivers=2)
    send(spec, make_weights())
    assert_equal(taken(spec), make_weights())
    assert_equal(taken(spec), make_weights())


@pytest.mark.parametrize("transport", BY_BYTES)
def test_tensors_are_cast_to_the_dtype_that_the_receiver_wants(transport: str, tmp_path: Path) -> None:
    spec = make_spec(transport, tmp_path, dtype="bfloat16")
    send(spec, make_weights())
    assert_equal(taken(spec), [(name, tensor.bfloat16()) for name, tensor in make_weights()])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tied_tensors_arrive_under_both_names(transport: str, tmp_path: Path) -> None:
    spec, tensor = make_spec(transport, tmp_path), torch.randn(4, 4)
    send(spec, [("a", tensor), ("b", tensor)])
    assert_equal(taken(spec), [("a", tensor), ("b", tensor)])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_sent_is_an_error_after_the_deadline(transport: str, tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"after 0\.05 s"):
        taken(make_spec(transport, tmp_path, timeout_seconds=0.05))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_earlier_session_is_refused_as_stale(transport: str, tmp_path: Path) -> None:
    earlier = make_spec(transport, tmp_path, 6)
    send(earlier, make_weights())
    with pytest.raises(WeightSyncError, match=f"session {earlier.session}.*version 6"):
        taken(make_spec(transport, tmp_path, 7, timeout_seconds=0.05))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_version_under_the_same_session_is_refused(transport: str, tmp_path: Path) -> None:
    sent = make_spec(transport, tmp_path, 3)
    send(sent, make_weights())
    wanted = attrs.evolve(sent, version=4)
    with pytest.raises(WeightSyncError, match="sent version 3, wanted 4"):
        taken(wanted)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_name_from_two_senders_is_refused(transport: str, tmp_path: Path) -> None:
    spec = make_spec(transport, tmp_path, senders=2)
    send(spec, make_weights(), sender=0)
    send(spec, make_weights()[:1], sender=1)
    with pytest.raises(WeightSyncError, match=r"embed\.weight came"):
        taken(spec)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_name_sent_twice_is_refused_at_the_sender(transport: str, tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"embed\.weight was sent twice"):
        send(make_spec(transport, tmp_path), [*make_weights(), make_weights()[0]])


@pytest.mark.parametrize("transport", BY_BYTES)
def test_a_sender_that_fails_half_way_ends_the_wait_of_the_receiver(transport: str, tmp_path: Path) -> None:
    def failing():  # type: ignore[no-untyped-def]
        yield make_weights()[0]
        raise MemoryError("no room for the next")

    spec = make_spec(transport, tmp_path, timeout_seconds=60.0)
    with pytest.raises(MemoryError):
        send(spec, failing())
    with pytest.raises(WeightSyncError, match="gave up: MemoryError: no room for the next"):
        taken(spec)


def test_a_missing_sender_is_named(tmp_path: Path) -> None:
    for transport in BY_BYTES:
        spec = make_spec(transport, tmp_path / transport, senders=2, timeout_seconds=0.05)
        send(spec, make_weights(), sender=0)
        with pytest.raises(WeightSyncError, match=r"1 of 2 senders.*sender 1: none"):
            taken(spec)


@pytest.mark.parametrize("transport", BY_FILE)
def test_a_flipped_bit_is_found(transport: str, tmp_path: Path) -> None:
    spec = make_spec(transport, tmp_path)
    send(spec, make_weights())
    file = sent_file(spec)
    data = bytearray(file.read_bytes())
    at = data.find(make_weights()[3][1].numpy().tobytes()) + 5000
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightSyncError, match=r"large\.weight in .*(weights|memory)-.* is damaged: .*checksum"):
        taken(spec)


@pytest.mark.parametrize("transport", BY_FILE)
def test_a_file_cut_short_is_found(transport: str, tmp_path: Path) -> None:
    spec = make_spec(transport, tmp_path)
    send(spec, make_weights())
    file = sent_file(spec)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(WeightSyncError, match="is damaged"):
        taken(spec)


def test_a_file_that_is_gone_is_found(tmp_path: Path) -> None:
    spec = make_spec("disk", tmp_path)
    send(spec, make_weights())
    sent_file(spec).unlink()
    with pytest.raises(WeightSyncError, match="is damaged"):
        taken(spec)


@pytest.mark.parametrize("transport", BY_FILE)
def test_a_broken_manifest_is_named(transport: str, tmp_path: Path) -> None:
    spec = make_spec(transport, tmp_path)
    send(spec, make_weights())
    (tmp_path / "manifest-0.json").write_text('{"session": "x"')
    with pytest.raises(WeightSyncError, match=r"manifest-0\.json is no manifest"):
        taken(spec)


@pytest.mark.parametrize("transport", BY_FILE)
@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", ".."])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(transport: str, name: str, tmp_path: Path) -> None:
    spec = make_spec(transport, tmp_path)
    send(spec, make_weights())
    file = tmp_path / "manifest-0.json"
    document = json.loads(file.read_text())
    document["entries"][2]["file"] = name
    file.write_text(json.dumps(document))
    with pytest.raises(WeightSyncError, match="wanted one beside it"):
        taken(spec)


@pytest.mark.parametrize("transport", BY_FILE)
def test_a_session_begun_while_another_is_read_is_refused(transport: str, tmp_path: Path) -> None:
    spec = make_spec(transport, tmp_path)
    send(spec, make_weights())
    reading = receive(spec)
    next(reading)
    send(make_spec(transport, tmp_path, 2), make_weights(2))
    with pytest.raises(WeightSyncError, match=r"another session|damaged"):
        list(reading)


def test_files_hold_no_pickle_and_say_what_they_are(tmp_path: Path) -> None:
    send(make_spec("disk", tmp_path, 9), make_weights())
    manifest = json.loads((tmp_path / "manifest-0.json").read_text())
    assert manifest["version"] == 9
    assert manifest["entries"][1] == {
        **manifest["entries"][1],
        "name": "norm.weight",
        "shape": [7],
        "dtype": "bfloat16",
    }


def test_the_best_transport_that_both_know_and_the_placement_allows_is_chosen() -> None:
    known, apart = TRANSPORTS, {"shared-memory": True, "disk": True}
    near = {"shared": True, **apart}
    assert choose_transport(known, known, near, "", "in one process") == "shared"
    assert choose_transport(known, known, apart, "", "on one machine") == "shared-memory"
    assert choose_transport(known, known, apart, "", "on different machines") == "shared-memory"
    assert choose_transport(known, ("shared", "disk"), apart, "", "on different machines") == "disk"
    assert choose_transport(("disk", "shared"), known, near, "", "in one process") == "disk"
    with pytest.raises(ConfigError, match="backend offers shared, the generator takes disk, and they are in one"):
        choose_transport(("shared",), ("disk",), near, "", "in one process")
    with pytest.raises(ConfigError, match="on different machines"):
        choose_transport(("shared", "cuda-ipc"), known, apart, "", "on different machines")
