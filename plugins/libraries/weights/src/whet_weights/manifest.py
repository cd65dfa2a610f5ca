"""The manifest of a weight sync through files. It lists the sent tensors: a receiver can prove that all have arrived.

    sender      remove the old manifest -> write the bytes -> write the manifest under its name in one step
    receiver    wait for the manifest of its session -> read -> compare the checksums -> read the manifest again

So a manifest never lies beside the bytes of another session.
"""

import json
import os
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from whet.errors import WeightSyncError
from whet.interfaces.weights import TransferSpec
from whet_weights.shared_pages import this_node

if TYPE_CHECKING:
    import torch

PAGE = 4096


@frozen
class Entry:
    """One tensor of a transfer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The dtype's name in torch, e.g. `bfloat16`."""
    checksum: int
    file: str
    """Name of the file, within the folder of the transfer."""
    offset: int = 0
    """Bytes from the beginning of the file, for files that have no index of their own."""


@frozen
class Manifest:
    """What one sender sent in one session."""

    session: str
    version: int
    sender: int
    entries: tuple[Entry, ...]
    failed: str = ""
    """Why the sender gave up, so that receivers need not wait for their deadline. Empty: the sender did not give up."""
    node: str = ""
    """The node on which the files can be read. Empty: on every node."""
    size: int = 0
    """Size of the sender's memory, in bytes."""


def checksum(tensor: "torch.Tensor") -> int:
    """Return a checksum of a contiguous tensor: the crc32 of the 64-bit sums of its pages of 4 KiB.

    It detects torn pages, stale pages and flipped bits. It runs at the speed of memory; crc32 alone is slower.
    """
    import torch

    data = tensor.detach().reshape(-1).view(torch.uint8)
    whole = data.numel() // PAGE * PAGE
    if data.storage_offset() % 8:
        data = data.clone()
    pages = data[:whole].view(torch.int64).view(-1, PAGE // 8).sum(1)
    return zlib.crc32(data[whole:].cpu().numpy().data, zlib.crc32(pages.cpu().numpy().data))


def byte_count(entry: Entry) -> int:
    """Return the number of bytes of a tensor."""
    import torch

    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype.itemsize * torch.Size(entry.shape).numel()


def manifest_path(spec: TransferSpec, sender: int, carried: str = "") -> Path:
    """Return the path of a sender's manifest. `carried` is a node: the path is for the copy on that node."""
    return Path(spec.address) / f"manifest-{sender}{'@' * bool(carried)}{carried}.json"


def carried_nodes(spec: TransferSpec, sender: int) -> list[str]:
    """Return the nodes that have a manifest of their own for this sender."""
    return [path.stem.partition("@")[2] for path in Path(spec.address).glob(f"manifest-{sender}@*.json")]


def withdraw(spec: TransferSpec, sender: int) -> None:
    """Create the folder if needed and remove the sender's manifest of an earlier session."""
    Path(spec.address).mkdir(parents=True, exist_ok=True)
    for node in ("", *carried_nodes(spec, sender)):
        manifest_path(spec, sender, node).unlink(missing_ok=True)


def publish(
    spec: TransferSpec, sender: int, entries: Iterable[Entry], failed: str = "", *, node: str = "", size: int = 0
) -> None:
    """Write the manifest of a sender."""
    manifest = Manifest(spec.session, spec.version, sender, tuple(entries), failed, node, size)
    write(manifest, manifest_path(spec, sender))


def write(manifest: Manifest, path: Path) -> None:
    """Write a manifest in one step: it exists completely or not at all."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(asdict(manifest)))
    os.replace(draft, path)


def read_here(spec: TransferSpec, sender: int) -> Manifest | None:
    """Return the manifest that is valid on this node: the sender's own, or the one of the copy on this node."""
    found, here = read(spec, sender), this_node()
    return found if found is None or found.failed or found.node in ("", here) else read(spec, sender, here)


def read(spec: TransferSpec, sender: int, carried: str = "") -> Manifest | None:
    """Return a sender's manifest, or None if there is none. Raises `WeightSyncError` if the file is no manifest."""
    path = manifest_path(spec, sender, carried)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        entries = tuple(Entry(**{**e, "shape": tuple(e["shape"])}) for e in document.pop("entries"))
        if outside := next((entry.file for entry in entries if "/" in entry.file or entry.file[:1] in ("", ".")), None):
            raise ValueError(f"it names the file {outside!r:.120}, wanted one beside it")
        return Manifest(**document, entries=entries)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightSyncError(f"{path} is no manifest of a weight sync: {error}") from error


def await_manifests(spec: TransferSpec) -> list[Manifest]:
    """Wait until every sender of the transfer has published, and return the manifests in order of sender.

    Raises `WeightSyncError` when the deadline passes, a sender gave up, or a version or a name contradicts the spec.
    """
    deadline, pause = time.monotonic() + spec.timeout_seconds, 0.0005
    manifests: dict[int, Manifest] = {}
    while True:
        for sender in range(spec.senders):
            found = manifests.get(sender) or read_here(spec, sender)
            if found and found.session == spec.session:
                manifests[sender] = found
        if len(manifests) == spec.senders:
            break
        if time.monotonic() > deadline:
            raise WeightSyncError(_overdue(spec, [s for s in range(spec.senders) if s not in manifests]))
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    ordered = [manifests[sender] for sender in range(spec.senders)]
    check(spec, ordered)
    return ordered


def still_current(spec: TransferSpec, manifests: Iterable[Manifest]) -> None:
    """Raise `WeightSyncError` if a sender began another session while this session was read."""
    for manifest in manifests:
        now = read_here(spec, manifest.sender)
        if now is None or now.session != spec.session:
            raise WeightSyncError(
                f"{title(spec)}: sender {manifest.sender} began another session while this one was read"
            )


def damaged(spec: TransferSpec, entry: Entry, found: str) -> WeightSyncError:
    """Return the error for bytes that differ from the manifest."""
    where = Path(spec.address) / entry.file
    return WeightSyncError(f"{title(spec)}: {entry.name} in {where} is damaged: {found}")


def check(spec: TransferSpec, manifests: list[Manifest]) -> None:
    """Raise `WeightSyncError` if a sender gave up, or a version or a name contradicts the spec."""
    owner: dict[str, int] = {}
    for manifest in manifests:
        if manifest.failed:
            raise WeightSyncError(f"{title(spec)}: sender {manifest.sender} gave up: {manifest.failed}")
        if manifest.version != spec.version:
            raise WeightSyncError(
                f"{title(spec)}: sender {manifest.sender} sent version {manifest.version}, wanted {spec.version}"
            )
        for entry in manifest.entries:
            first = owner.setdefault(entry.name, manifest.sender)
            if first != manifest.sender:
                raise WeightSyncError(f"{title(spec)}: {entry.name} came from senders {first} and {manifest.sender}")


def _overdue(spec: TransferSpec, missing: list[int]) -> str:
    lines = []
    for sender in missing:
        found = read(spec, sender)
        what = f"that of session {found.session}, version {found.version}" if found else "none"
        lines.append(f"sender {sender}: {what}")
    return (
        f"{title(spec)}: no complete manifest of {len(missing)} of {spec.senders} senders in {spec.address} after "
        f"{spec.timeout_seconds:g} s; found of {'; '.join(lines)}"
    )


def title(spec: TransferSpec) -> str:
    """Return the name of a transfer for error messages."""
    return f"weight sync {spec.session} of version {spec.version}"


def dtype_name(dtype: Any) -> str:
    """Return torch's name of a dtype without the module."""
    return str(dtype).removeprefix("torch.")
